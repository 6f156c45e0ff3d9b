"""Where batches come from: rows are read, rendered, tokenised and packed once, and then only looked up.

Importing this package costs nothing; the parts are imported by name:

    prepare.prepare_data(DataRequest, tokenizer) -> PreparedData      once a node, before any process group
    store.TokenStore.open(folder)                                     memory-mapped documents and sequences
    plan.plan_run(...) -> SamplePlan                                  which sequences a step reads, in O(1)
    loader.Loader(store, plan, batches, data_rank)                    this data rank's micro-batches, read ahead
    loader.evaluation_batches(store, ...)                             every held-out document once over all ranks
    preview.example(store, tokenizer, index)                          one document as text, with its trained part
"""
