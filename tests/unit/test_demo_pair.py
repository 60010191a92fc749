"""The real demo pair, made from its package: SmolLM2-135M-Instruct must speak, with SmolLM2's own token ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ssd.demo import DemoError, DemoPair, demo_pair

pytestmark = pytest.mark.server

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            yield demo_pair(progress=False)
        except DemoError as error:
            pytest.skip(str(error))


def test_token_ids(made: DemoPair) -> None:
    """Ids of SmolLM2's tokenizer.json; the second line fails under GPT-2's plain pre-tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    assert len(tokenizer) == 49152
    assert tokenizer.encode("<|im_start|>user\nHi 12345 it's<|im_end|>") == [
        *[1, 4093, 198, 26843, 216, 33, 34, 35, 36, 37, 357, 506, 2]
    ]
    assert tokenizer.encode(" The year  2024.\n\n2. a") == [378, 713, 256, 34, 32, 34, 36, 30, 1116, 34, 30, 253]
    text = "café naïve 日本語 😀\n\tif x == 10:\r\n  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_greedy_answer(made: DemoPair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    model = AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(prompt["input_ids"][0])
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_the_draft_shares_the_targets_vocabulary(made: DemoPair) -> None:
    target, draft = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (made.target, made.draft))
    assert draft == target
    assert made.stand_in == (made.draft == made.target)
