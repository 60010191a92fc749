"""Distillation on a tiny pair: it learns, it goes on where it stopped, and its parts are what their names say."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from sglang_ssd.demo.distill import __main__ as program
from sglang_ssd.demo.distill.attention import STEPPED
from sglang_ssd.demo.distill.comparison import Comparison
from sglang_ssd.demo.distill.generate import Source, write_slices
from sglang_ssd.demo.distill.objective import agreement, forward_kl, places_in_map
from sglang_ssd.demo.distill.student import layer_tensors, load_target, make_student, make_token_map
from sglang_ssd.demo.distill.teacher import Pack, Targets, Teacher
from sglang_ssd.demo.distill.texts import Text, count_tokens, pack, read_texts, write_texts
from sglang_ssd.demo.distill.training import Progress, Recipe, Trainer, pack_of_step
from sglang_ssd.demo.distill.writer import Conversation, Frame, Writer
from tests.models import EOS, make_llama


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("target"), seed=7, layers=4, tied=True)


@pytest.fixture(scope="module")
def texts():
    dice = torch.Generator().manual_seed(1)
    lengths = torch.randint(12, 40, (40,), generator=dice).tolist()
    ids = [tuple(torch.randint(4, 1000, (n,), generator=dice).tolist()) for n in lengths]
    return [Text(each, prompt=5) for each in ids]


def float_target(path, attention="sglang_ssd_packed"):
    return load_target(str(path), "cpu", attention).float()


class Study:
    """A tiny student, its teacher and a trainer, made anew as a fresh process would."""

    def __init__(self, target_path, folder, texts, recipe, start=None, clock=None):
        torch.manual_seed(0)
        target = float_target(target_path)
        self.map = make_token_map(count_tokens(texts), 600, 1000)
        self.student = make_student(target, 2, start)
        self.comparison = Comparison(self.student, Teacher(target, "tiny", folder / "t"), self.map, autocast=False)
        clocks = {} if clock is None else {"clock": clock}
        self.trainer = Trainer(self.comparison, recipe, folder / "checkpoint.pt", **clocks)
        self.packs = pack(texts[4:], 128, seed=0)

    def run(self, held_out, **limits):
        self.trainer.run(self.packs, held_out, **limits)
        return {name: each.detach().clone() for name, each in layer_tensors(self.student).items()}


def test_two_steps_lower_the_loss(target_path, tmp_path, texts):
    study = Study(target_path, tmp_path, texts, Recipe(steps=2, warm_up=0.0, floor=1.0, peak=5e-3))
    study.packs = study.packs[:1]
    before = study.comparison.score(study.packs[0])
    study.run(texts[:4])
    after = study.comparison.score(study.packs[0])
    assert after.kl < before.kl - 0.1
    assert study.trainer.progress.step == 2


def test_a_stopped_run_goes_on_to_the_same_result(target_path, tmp_path, texts):
    recipe = Recipe(steps=7, peak=1e-3)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Study(target_path, tmp_path / "whole", texts, recipe).run(texts[:4])
    Study(target_path, tmp_path / "parts", texts, recipe).run(texts[:4], stop_after=3)
    second = Study(target_path, tmp_path / "parts", texts, recipe)
    assert second.trainer.progress.step == 3
    parts = second.run(texts[:4])
    assert second.trainer.progress.step == 7
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_of_another_version_is_refused(target_path, tmp_path, texts):
    torch.save({"student": {}, "optimizer": {}, "progress": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another --out"):
        Study(target_path, tmp_path, texts, Recipe(steps=1))


def test_matrices_and_vectors_are_all_trained(target_path, tmp_path, texts):
    study = Study(target_path, tmp_path, texts, Recipe(steps=1, warm_up=0.0))
    before = {name: each.detach().clone() for name, each in layer_tensors(study.student).items()}
    after = study.run(texts[:4])
    assert {each.ndim for each in after.values()} == {1, 2}
    assert not any(torch.equal(before[name], after[name]) for name in after)


def test_minutes_end_a_run_over_all_its_starts(target_path, tmp_path, texts):
    """Every look at the clock takes 10 s; a step looks twice."""
    ticks = iter(range(0, 100_000, 10))
    recipe = Recipe(minutes=2)
    first = Study(target_path, tmp_path, texts, recipe, clock=lambda: next(ticks))
    first.run(texts[:4], stop_after=2)
    worked = first.trainer.progress.seconds
    assert 0 < worked < 120
    second = Study(target_path, tmp_path, texts, recipe, clock=lambda: next(ticks))
    second.run(texts[:4])
    assert second.trainer.progress.seconds >= 120
    assert second.trainer.progress.step > 2
    assert recipe.share(second.trainer.progress) == 1


def test_the_rate_rises_then_falls():
    recipe = Recipe(steps=100, peak=1.0, floor=0.1, warm_up=0.2)
    rates = [recipe.rate(recipe.share(Progress(step))) for step in range(101)]
    assert max(rates) == rates[20] == 1.0
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one of them"):
        Recipe(steps=3, minutes=2)
    with pytest.raises(ValueError, match="one of them"):
        Recipe()


def test_embedding_and_output_layer_stay_the_targets(target_path, tmp_path, texts):
    study = Study(target_path, tmp_path, texts, Recipe(steps=2))
    before = load_file(target_path / "model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    names = study.run(texts[:4]).keys()
    assert torch.equal(study.student.get_input_embeddings().weight, before)
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {name.split(".")[2] for name in names if "layers" in name} == {"0", "1"}


def test_a_new_student_has_the_outermost_layers(target_path):
    target = float_target(target_path)
    student = make_student(target, 3)
    theirs = [layer.mlp.up_proj.weight for layer in target.model.layers]
    ours = [layer.mlp.up_proj.weight for layer in student.model.layers]
    assert all(torch.equal(a, b) for a, b in zip(ours, [theirs[0], theirs[1], theirs[3]], strict=True))


def test_a_start_of_another_size_is_refused(target_path, tmp_path, texts):
    from sglang_ssd.demo.distill.student import save_layers

    target = float_target(target_path)
    save_layers(make_student(target, 2), tmp_path / "layers.safetensors")
    make_student(target, 2, tmp_path / "layers.safetensors")
    for layers in (1, 3):
        with pytest.raises(ValueError, match="does not fit"):
            make_student(target, layers, tmp_path / "layers.safetensors")


def test_texts_side_by_side_do_not_see_each_other(target_path, texts):
    target = float_target(target_path)
    together = Pack.of(texts[:3]).hidden(target)
    alone = torch.cat([Pack.of([text]).hidden(target) for text in texts[:3]])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    assert len(together) == sum(len(text.ids) - 5 for text in texts[:3])


def test_the_teacher_says_what_hugging_face_says(target_path, tmp_path, texts):
    from transformers import AutoModelForCausalLM

    teacher = Teacher(float_target(target_path), "tiny", tmp_path)
    targets = teacher.targets(texts[:2])
    reference = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).float()
    text = texts[1]
    with torch.inference_mode():
        want = reference(torch.tensor([text.ids])).logits[0, text.prompt - 1 : -1].log_softmax(-1)
    got = targets.log_p[-len(want) :].float()
    assert torch.equal(targets.ids[-len(want) :, 0].long(), want.argmax(-1))
    torch.testing.assert_close(got, want.topk(64).values, atol=2e-2, rtol=1e-3)


def test_the_teacher_is_asked_once(target_path, tmp_path, texts):
    first = Teacher(float_target(target_path), "tiny", tmp_path).targets(texts[:2])
    again = Teacher(None, "tiny", tmp_path).targets(texts[:2])
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.log_p, again.log_p)
    with pytest.raises(AttributeError):  # other texts would need the model
        Teacher(None, "tiny", tmp_path).targets(texts[:3])


def dense_kl(p, logits, token_map):
    """Reference on whole distributions: p over mapped tokens only, weighted with their mass."""
    q = torch.zeros_like(p).index_copy(1, token_map, logits.softmax(-1))
    total = 0.0
    for row in range(len(p)):
        kept = p[row, token_map]
        mass = kept.sum()
        total += float(mass * ((kept / mass) * ((kept / mass) / q[row, token_map]).log()).sum())
    return total


def test_forward_kl_against_whole_distributions():
    """With every token of a vocabulary of 64 among the target's likeliest, nothing is in the rest."""
    dice = torch.Generator().manual_seed(3)
    p = (3 * torch.randn(9, 64, generator=dice)).softmax(-1)
    token_map = torch.arange(1, 64, 2)
    logits = torch.randn(9, 32, generator=dice, requires_grad=True)
    log_p, ids = p.log().topk(64)
    targets = Targets(ids.int(), log_p)
    loss = forward_kl(logits, targets, places_in_map(token_map, 64))
    assert float(loss.detach()) == pytest.approx(dense_kl(p, logits.detach(), token_map), abs=1e-3)
    loss.backward()
    mass = p[:, token_map].sum(-1, keepdim=True)
    want = mass * logits.detach().softmax(-1) - p[:, token_map]
    torch.testing.assert_close(logits.grad, want, atol=1e-4, rtol=0)


def test_forward_kl_lumps_what_is_not_listed():
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
    q = logits.softmax(-1)[0]
    targets = Targets(torch.tensor([[0, 1]]), p[:, :2].log())
    want = 0.5 * (0.5 / q[0]).log() + 0.2 * (0.2 / q[1]).log() + 0.3 * (0.3 / (q[2] + q[3])).log()
    assert float(forward_kl(logits, targets, torch.arange(4))) == pytest.approx(float(want), abs=1e-4)


def test_agreement_counts_unmapped_tokens_as_wrong():
    targets = Targets(torch.tensor([[5, 1], [7, 5], [2, 7]]), torch.zeros(3, 2))
    logits = torch.tensor([[2.0, 1.0], [2.0, 3.0], [4.0, 1.0]])
    assert int(agreement(logits, targets, torch.tensor([5, 7]))) == 2


def test_packs_hold_every_text_once_and_epochs_differ(texts):
    packs = pack(texts, 100, seed=2)
    assert sorted(text.ids for each in packs for text in each) == sorted(text.ids for text in texts)
    assert all(sum(len(text.ids) for text in each) <= 100 for each in packs)
    assert len(packs) < len(texts)
    count = len(packs)
    first, second = ([pack_of_step(packs, step, 0) for step in range(e * count, (e + 1) * count)] for e in (0, 1))
    assert sorted(map(id, first)) == sorted(map(id, second)) == sorted(map(id, packs))
    assert first != second


def test_texts_are_read_back_and_cut(tmp_path, texts):
    write_texts(tmp_path / "a.jsonl", texts[:3])
    write_texts(tmp_path / "b.jsonl", [Text((1, 2, 3), 3)])  # no answer
    assert read_texts([tmp_path], 1000) == texts[:3]
    assert read_texts([tmp_path / "a.jsonl"], 8) == [Text(text.ids[:8], 5) for text in texts[:3]]


def test_the_map_takes_frequent_tokens_then_low_ids():
    counts = count_tokens([Text((9, 9, 9, 7, 7, 5), 1)])
    assert make_token_map(counts, 2, 20).tolist() == [7, 9]
    assert make_token_map(counts, 6, 20).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.fixture(scope="module")
def tokenizer(target_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path)


def test_conversations_keep_to_the_frame(tokenizer):
    frame = Frame.of(tokenizer)
    assert (frame.before, frame.after) == ((1,), (4,))
    frame = Frame((1, 50), (51, 52), frozenset({51, EOS}))
    row = Conversation([1, 50, 9], temperature=0.0)
    for token in (10, EOS, 99, 60, 61, EOS, 70):
        row.take(token, frame, turn=10, answer=5)
    assert row.ids == [1, 50, 9, 10, 51, 52, 60, 61, EOS]
    assert (row.prompt, row.done) == (6, True)


def test_turns_and_answers_have_limits():
    frame = Frame((1,), (51, 52), frozenset({51, EOS}))
    row = Conversation([1], temperature=0.0)
    for token in range(100, 120):
        row.take(token, frame, turn=3, answer=4)
    assert row.ids == [1, 100, 101, 102, 51, 52, 105, 106, 107, 108]
    assert row.prompt == 6


def test_greedy_answers_are_the_models_own(target_path, tokenizer):
    """A left-padded batch that rows leave, against one full forward of each text."""
    target = float_target(target_path, STEPPED)
    writer = Writer(target, Frame((1,), (4,), frozenset({EOS})), turn=0, answer=12)
    dice = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 1000, (n,), generator=dice).tolist() for n in (3, 17, 9)]
    written = writer.write([Conversation(list(ids), 0.0, prompt=len(ids)) for ids in prompts], seed=0)
    reference = float_target(target_path)
    for text, ids in zip(written, prompts, strict=True):
        assert list(text.ids[: text.prompt]) == ids
        assert len(text.ids) == text.prompt + 12 or text.ids[-1] == EOS
        hidden = Pack.of([text]).hidden(reference)
        assert reference.lm_head(hidden).argmax(-1).tolist() == list(text.ids[text.prompt :])


def test_slices_are_the_same_again_and_made_once(target_path, tokenizer, tmp_path):
    target = float_target(target_path, STEPPED)
    frame = Frame.of(tokenizer)
    source = Source(tokenizer, frame, given=["w10 w11", "w12"], rows=6, share_given=0.5)
    writer = Writer(target, frame, turn=8, answer=6)
    first = writer.write(source.start(3), seed=3)
    assert first == writer.write(source.start(3), seed=3)
    assert first != writer.write(source.start(4), seed=4)
    write_slices(writer, source, tmp_path, minutes=0)
    assert not list(tmp_path.iterdir())


def test_the_program_makes_a_draft_that_the_engine_loads(target_path, tmp_path, texts, capsys):
    from sglang_ssd.draft_server.engine_torch import TorchEngine
    from sglang_ssd.draft_server.settings import DraftSettings

    write_texts(tmp_path / "text.jsonl", texts)
    run = ["--target", str(target_path), "--out", str(tmp_path / "out"), "--layers", "2", "--steps", "3"]
    run += ["--texts", str(tmp_path / "text.jsonl"), "--map-size", "300", "--pack", "100"]
    assert program.main(run) == 0
    assert "3 steps" in capsys.readouterr().out
    draft = tmp_path / "out" / "draft"
    assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 2
    settings = DraftSettings(model_path=str(draft), endpoint="tcp://127.0.0.1:5555").for_engine()
    assert TorchEngine(settings).limits.vocab_size == 1000
    assert settings.token_map == str(draft / "token_map.pt")
    shipped = load_file(tmp_path / "out" / "layers.safetensors")
    whole = load_file(draft / "model.safetensors")
    assert whole.keys() - shipped.keys() == {"model.embed_tokens.weight"}
    assert all(torch.equal(shipped[name], whole[name]) for name in shipped)


def test_without_text_the_program_says_how_to_make_it(target_path, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    assert program.main(["--target", str(target_path), "--out", str(tmp_path), "--steps", "1"]) == 2
    assert "--generate" in capsys.readouterr().err
