from __future__ import annotations

import pytest
import torch

import tiny
from fleetune.models.contrastive import Contrast, contrastive_search


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_the_formula(module, prompt, alpha, top_k, count):
    """The same search without a cache, one candidate at a time, as the paper writes it."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            before = module(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        chances = torch.softmax(before.logits[0, -1], -1)
        best = None
        for candidate in chances.topk(top_k).indices.tolist():
            with torch.no_grad():
                after = module(input_ids=torch.tensor([[*tokens, candidate]]), output_hidden_states=True, use_cache=False)
            states = after.hidden_states[-1][0]
            likeness = max(float(torch.cosine_similarity(states[-1], state, dim=0)) for state in states[:-1])
            score = (1 - alpha) * float(chances[candidate]) - alpha * likeness
            best = max(best or (-9.0, -1), (score, candidate))
        tokens.append(best[1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "gpt_oss"])
def test_each_token_is_the_one_of_the_papers_formula(family, tmp_path):
    sizes = {"state_size": 4, "time_step_rank": 4, "intermediate_size": 96} if family == "mamba" else {}
    module = load(tiny.write_model(tmp_path / family, family, **sizes))
    prompt = [5, 9, 40, 7]
    found = contrastive_search(module, prompt, contrast=Contrast(0.6, 4), stop=set(), max_new_tokens=6)
    assert found == by_the_formula(module, prompt, 0.6, 4, 6)


def test_it_says_something_else_than_greedy_decoding_and_stops_where_it_is_told(tiny_llama):
    module = load(tiny_llama)
    prompt = [5, 9, 40, 7]
    seen = []
    found = contrastive_search(module, prompt, contrast=Contrast(0.6, 4), stop=set(), max_new_tokens=8, on_token=seen.append)
    greedy = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    assert found == seen and found != greedy
    assert len(set(found)) > len(set(greedy)) or len(set(found)) == 8
    stopped = contrastive_search(module, prompt, contrast=Contrast(0.6, 4), stop={found[3]}, max_new_tokens=8)
    assert stopped == found[: found.index(found[3])]


@pytest.mark.parametrize("values", [(0.0, 4), (1.5, 4), (0.6, 1)])
def test_numbers_that_are_no_contrast_are_refused(values):
    with pytest.raises(ValueError, match="penalty_alpha"):
        Contrast(*values)
