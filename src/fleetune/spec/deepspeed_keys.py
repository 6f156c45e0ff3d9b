"""DeepSpeed's own settings by name: which are handed on, which have no effect here, and which are refused, with the reason.

The names are those of DeepSpeed 0.19 (its `runtime/constants.py` and `runtime/zero/config.py`).
"""

from __future__ import annotations

#: Settings of `zero_optimization` that DeepSpeed gets as they are, and what they may be.
ZERO_PASSED: dict[str, type] = {
    "contiguous_gradients": bool,
    "reduce_scatter": bool,
    "reduce_bucket_size": int,
    "use_multi_rank_bucket_allreduce": bool,
    "allgather_partitions": bool,
    "allgather_bucket_size": int,
    "overlap_comm": bool,
    "sub_group_size": int,
    "ignore_unused_parameters": bool,
    "round_robin_gradients": bool,
    "memory_efficient_linear": bool,
    "stage3_prefetch_bucket_size": int,
    "stage3_param_persistence_threshold": int,
    "stage3_model_persistence_threshold": int,
    "stage3_max_live_parameters": int,
    "stage3_max_reuse_distance": int,
    "stage3_use_all_reduce_for_fetch_params": bool,
    "stage3_allgather_sequential": bool,
}
#: Settings of `offload_optimizer` and `offload_param` that DeepSpeed gets, beside `device`.
OFFLOAD_PASSED: dict[str, type] = {
    "pin_memory": bool,
    "buffer_count": int,
    "buffer_size": int,
    "max_in_cpu": int,
    "fast_init": bool,
    "pipeline_read": bool,
    "pipeline_write": bool,
}

#: Settings at the top that DeepSpeed gets as they are.
PASSED: dict[str, type] = {
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "communication_data_type": str,
    "comms_logger": dict,
    "disable_allgather": bool,
}

_CHECKPOINTS = "checkpoints and results are fleetune's own, whole and readable without DeepSpeed"
_ANY_OPTIMIZER = "fleetune hands DeepSpeed an optimizer that it has tested"
#: Settings that need no meaning here: they may be given, and the note says what happens instead.
WITHOUT_EFFECT: dict[str, str] = {
    "zero_allow_untested_optimizer": _ANY_OPTIMIZER,
    "zero_force_ds_cpu_optimizer": f"{_ANY_OPTIMIZER}; --optimizer cpu_adam chooses DeepSpeed's",
    "checkpoint": _CHECKPOINTS,
    "data_types": "what is trained is fp32, and so are its gradients",
    "aio": "it is for offload to NVMe",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _CHECKPOINTS,
    "zero_optimization.load_from_fp32_weights": _CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINTS,
    "zero_optimization.override_module_apply": "the model is not built inside DeepSpeed's context",
    "zero_optimization.log_trace_cache_warnings": "DeepSpeed's warnings are not shown",
    "fp16.hysteresis": "the loss scale is halved at the first overflow",
    "fp16.consecutive_hysteresis": "the loss scale is halved at the first overflow",
    "fp16.auto_cast": "tokens are no floating point numbers",
    "bf16.immediate_grad_update": "what is trained is fp32, and so are its gradients",
    "bf16.check_grad_overflow": "a gradient that is not finite is never applied",
    "optimizer.params.torch_adam": "AdamW is torch's unless --optimizer cpu_adam is given",
    "optimizer.params.adam_w_mode": "decay is always decoupled",
    "optimizer.params.bias_correction": "AdamW always corrects its bias",
    "optimizer.legacy_fusion": "AdamW is torch's unless --optimizer cpu_adam is given",
}

_SCHEDULE = "the learning rate follows fleetune's own schedule, which is resumed exactly"
_WEIGHTS = "it changes the numbers that are trained with, and nobody has compared them with those of one process"
_ELSEWHERE = "fleetune does this itself"
#: Settings that are refused: why, and what to do.
REFUSED: dict[str, tuple[str, str]] = {
    "scheduler": (_SCHEDULE, "leave it out and give --schedule, --warmup and --final-learning-rate-share"),
    "tensorboard": (_ELSEWHERE, "leave it out and give --tensorboard"),
    "wandb": (_ELSEWHERE, "leave it out"),
    "csv_monitor": (_ELSEWHERE, "leave it out: metrics.jsonl holds every step"),
    "comet": (_ELSEWHERE, "leave it out"),
    "activation_checkpointing": (_ELSEWHERE, "leave it out and give --gradient-checkpointing"),
    "flops_profiler": (_ELSEWHERE, "leave it out"),
    "autotuning": ("it would start runs of its own", "leave it out: fleetune plan divides the step"),
    "elasticity": ("the number of ranks may change with any --resume", "leave it out"),
    "prescale_gradients": ("gradients are summed over trained tokens, and DeepSpeed's own scaling is undone", "leave it out"),
    "gradient_predivide_factor": (
        "gradients are summed over trained tokens, and DeepSpeed's own scaling is undone",
        "leave it out",
    ),
    "gradient_allreduce_op": (
        "gradients are summed over trained tokens, and DeepSpeed's own scaling is undone",
        "leave it out",
    ),
    "managed_gradient_accumulation": (_ELSEWHERE, "leave it out"),
    "sparse_gradients": ("no model here has sparse gradients", "leave it out"),
    "torch_autocast": (_ELSEWHERE, "leave it out and give --precision"),
    "amp": ("NVIDIA's apex is not used", "leave it out and give --precision"),
    "tensor_parallel": ("DeepSpeed's tensor parallelism is not used", "leave it out and give --tensor without DeepSpeed"),
    "sequence_parallel_size": ("sequences are not split over ranks", "leave it out"),
    "pipeline": ("DeepSpeed's pipeline is not used", "leave it out and give --pipeline without DeepSpeed"),
    "compression_training": (_WEIGHTS, "leave it out"),
    "data_efficiency": ("rows are planned by fleetune, so that none is lost or repeated", "leave it out"),
    "curriculum_learning": ("rows are planned by fleetune, so that none is lost or repeated", "leave it out"),
    "sparse_attention": (_WEIGHTS, "leave it out"),
    "hybrid_engine": ("it is for generation inside training", "leave it out"),
    "load_universal_checkpoint": (_CHECKPOINTS, "leave it out, and give --resume"),
    "compile": ("compiled models are not supported with DeepSpeed", "leave it out"),
    "zero_optimization.zenflow": (_WEIGHTS, "leave it out"),
    "zero_optimization.legacy_stage1": ("DeepSpeed has removed it", "leave it out"),
    "zero_optimization.cpu_offload": ("DeepSpeed has replaced it", 'write "offload_optimizer": {"device": "cpu"} in its place'),
    "zero_optimization.cpu_offload_params": ("DeepSpeed has replaced it", 'write "offload_param": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ("DeepSpeed has replaced it", 'write "offload_param": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "DeepSpeed has replaced it",
        'write "pin_memory": true into "offload_optimizer"',
    ),
    "zero_optimization.zero_hpz_partition_size": ("a second set of pieces is not supported", "leave it out"),
    "zero_optimization.zero_quantized_weights": (_WEIGHTS, "leave it out"),
    "zero_optimization.zero_quantized_nontrainable_weights": (_WEIGHTS, "leave it out"),
    "zero_optimization.zero_quantized_gradients": (_WEIGHTS, "leave it out"),
    "zero_optimization.mics_shard_size": ("shards within groups of ranks are not supported", "leave it out"),
    "zero_optimization.mics_hierarchical_params_gather": ("shards within groups of ranks are not supported", "leave it out"),
    "zero_optimization.compute_grad_norm": ("every step's gradient norm is recorded", "leave it out"),
    "zero_optimization.parameter_alignment": ("checkpoints do not know the gaps that it makes", "leave it out"),
    "zero_optimization.stage3_module_granularity_threshold": (
        "blocks with a frozen input would lose their gradient",
        "leave it out",
    ),
    "zero_optimization.leaf_module": ("blocks with a frozen input would lose their gradient", "leave it out"),
    "fp16.fp16_master_weights_and_grads": ("what is trained is fp32", "leave it out"),
    "bf16.bf16_master_weights_and_grads": ("what is trained is fp32", "leave it out"),
    "bf16.bf16_optimizer_states": ("the optimizer's moments are fp32", "leave it out"),
}

#: What a refused setting may say all the same: it is what DeepSpeed does by default, and what happens here.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "gradient_predivide_factor": (1,),
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
    "sequence_parallel_size": (1,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.compute_grad_norm": (True,),
}
