"""Weight syncs: healthy engines are proved in every format, planted faults are found, the probe is what it says."""

from pathlib import Path

import numpy as np
import pytest
import standins
import torch
from conftest import Held, make_cfg, tiny_model
from safetensors.torch import load_file, save_file
from sync_faults import FAULTS, FORMATS, IDS, Rig, scale_of_one, stands_still
from transformers import AutoModelForCausalLM

import quant
import sync
from engines import HFEngine
from learner import Comm, Learner, LearnerCheck
from rollout import uniforms
from sync import Digest, Probe, Reference, Slope, SyncError, decode_since, judge, prove

# ---------------------------------------------------------------------------------------------------------------------
# Slopes
# ---------------------------------------------------------------------------------------------------------------------


def test_a_slope_by_hand():
    """Least squares through the origin; its error is the larger of two, for tokens and for rows."""
    x = np.array([[1.0, 2, 0, -1, 3], [2, -2, 1, 1, -3]])
    y = 0.5 * x + np.array([[0.1, -0.1, 5, 0.1, 0.2], [0, 0.1, -0.1, 0, 0.1]])  # where x is 0 nothing is said
    square = sum(v * v for row in x for v in row)
    b = sum(u * v for row, other in zip(y, x, strict=True) for u, v in zip(row, other, strict=True)) / square
    errors = [[(u - b * v) * (v != 0) for u, v in zip(p, q, strict=True)] for p, q in zip(y, x, strict=True)]
    of_tokens = (sum(e * e for row in errors for e in row) / (9 - 1) / square) ** 0.5
    alone = [sum(u * v for u, v in zip(p, q, strict=True)) / sum(v * v for v in q) for p, q in zip(y, x, strict=True)]
    of_rows = ((2 - 1) / 2 * sum((other - b) ** 2 for other in alone)) ** 0.5  # what is left of two without one
    slope = Slope.of(y, x)
    assert slope.b == pytest.approx(b, rel=1e-12)
    assert slope.se == pytest.approx(max(of_tokens, of_rows), rel=1e-12)
    assert of_tokens != pytest.approx(of_rows)
    assert (slope.low, slope.high) == pytest.approx((b - 6 * slope.se, b + 6 * slope.se))
    assert Slope.of(y, x, 0.7).se == pytest.approx(0.7 / square**0.5) and Slope.of(y, x, 1e-3) == slope


def test_a_slope_leaves_out_what_is_not_there_and_says_nothing_of_nothing():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 9)), rng.normal(size=(4, 9))
    gone = np.zeros((4, 9), bool)
    gone[:, 5:] = True
    assert Slope.of(np.where(gone, np.nan, y), x).b == pytest.approx(Slope.of(y[:, :5], x[:, :5]).b)
    assert np.isnan(Slope.of(y, 0 * x).b)
    assert np.isnan(Slope.of(y[:1, :7], x[:1, :7]).b)  # seven tokens


def test_errors_that_a_row_shares_widen_a_slope():
    rng = np.random.default_rng(1)
    x = 1 + 0.01 * rng.normal(size=(16, 40))
    own = x + 0.5 * rng.normal(size=x.shape)
    shared = x + 0.5 * rng.normal(size=(16, 1))
    assert Slope.of(shared, x).se > 3 * Slope.of(own, x).se
    assert Slope.of(shared, x).se == pytest.approx(0.5 / 4, rel=0.5)


# of what a healthy engine said in training of sampled tokens: (error of its prompts, changes published, its own, and
# log p before); its rounding moved one token by 0.1 nats in bfloat16, and two of 16 by 0.007 in float16
FEW_TOKENS = {
    "bfloat16": (
        0.03,
        1e-4 * np.array([[254, 10, 29, 33], [-135, -76, 61, 64], [275, 196, -845, -41], [-201, -35, -41, -35]]),
        1e-4 * np.array([[-72, 21, 34, 1], [-30, 17, -47, np.nan], [29, 433, 147, -82], [42, -105, -137, -91]]),
        np.full((4, 4), -1.0),
    ),
    "float16": (
        0.0042,
        1e-4 * np.array([[-0.7, -0.1, -0.7, -0.1], [-126, -3, 15, -12], [-1, -122, -0.6, 0], [-0.1, -0.1, 0, 0]]),
        1e-4 * np.array([[-0.4, -0.1, -0.7, -0.1], [-50, -3, 33, -17], [-1, -57, -0.9, 0], [-0.1, -0.1, 0, 0]]),
        -np.array([[0.003, 8e-4, 0.002, 6e-4], [3.7, 0.004, 0.23, 0.56], [0.003, 1.7, 0.003, 2e-4], [1e-3] * 4]),
    ),
}


@pytest.mark.parametrize("dtype", FEW_TOKENS)
def test_a_token_that_has_most_of_the_change_accuses_nobody(dtype):
    error, x, y, published = FEW_TOKENS[dtype]
    tokens = np.arange(16).reshape(4, 4)
    before = Reference(1, published + error, published, tokens)
    slope = decode_since(before, tokens, before.engine + y, published + x, error)
    sigmas = {}
    for at in np.ndindex(4, 4):
        then, now = 1 - np.exp(published[at]), 1 - np.exp(published[at] + x[at])
        sigmas[at] = error * (then**2 + now**2) ** 0.5
    there = [at for at in np.ndindex(4, 4) if not np.isnan(y[at])]
    square = sum(x[at] ** 2 for at in there)
    assert slope.se == pytest.approx(sum((sigmas[at] * x[at]) ** 2 for at in there) ** 0.5 / square, rel=1e-6)
    assert judge("sampled tokens", 2, before, slope) == "unproven"
    with pytest.raises(SyncError, match="it samples from weights of which some are old"):
        judge("sampled tokens", 2, before, Slope.of(y, x))


def test_few_tokens_accuse_at_twice_the_errors_of_many():
    """What a healthy engine in float16 came nearest to, in 149 versions: 6.2 standard errors from 1."""
    before = Reference(85, np.zeros((1, 1)), np.zeros((1, 1)))
    seen = Slope(0.41, 0.0783)
    with pytest.raises(SyncError, match="some are old"):
        judge("prompts", 86, before, seen)
    assert judge("sampled tokens", 86, before, seen, sync.FEW) == "unproven"
    with pytest.raises(SyncError, match="it samples from old weights"):
        judge("sampled tokens", 86, before, Slope(0.0, 0.04), sync.FEW)


def test_sampled_tokens_that_differ_from_the_references_do_not_count():
    """Nor do those behind the first that differs: the engine has said something of another prefix."""
    x = np.linspace(0.01, 0.02, 16).reshape(4, 4)
    published = np.full((4, 4), -1.0)
    tokens = np.arange(16).reshape(4, 4)
    before, now = Reference(1, published, published, tokens), tokens.copy()
    now[0, 2] = 99
    said = published + x
    said[0, 2:] = -5.0
    assert decode_since(before, now, said, published + x, 1e-3).b == pytest.approx(1)
    assert abs(decode_since(before, tokens, said, published + x, 1e-3).b - 1) > 1
    assert np.isnan(decode_since(None, tokens, published, None, 0.003).b)


@pytest.mark.parametrize(
    "b, se, verdict",
    [
        (1.0, 0.001, "proved"),
        (0.9, 0.1, "proved"),
        (0.9, 0.2, "unproven"),
        (0.3, 0.2, "unproven"),
        (float("nan"), float("nan"), "same"),
        (0.0, 0.01, "it samples from old weights"),
        (0.7, 0.01, "it samples from weights of which some are old"),
        (1.12, 0.001, "it has other weights"),
        (3.0, 0.1, "it has other weights"),
        (-1.0, 0.1, "it samples from old weights"),
    ],
)
def test_what_a_slope_says(b, se, verdict):
    before = sync.Reference(3, np.zeros((1, 1)), np.zeros((1, 1)))
    if verdict in ("proved", "unproven", "same"):
        assert sync.judge("prompts", 4, before, Slope(b, se)) == verdict
        return
    with pytest.raises(SyncError, match=f"version 4: of what changed since version 3 .* of prompts .*{verdict}"):
        sync.judge("prompts", 4, before, Slope(b, se))


def test_the_level_of_an_engine_is_that_of_the_published_weights():
    """x varies by 2; an engine off by a tenth of that explains 99 % of its spread, one off by a half 75 %."""
    rng = np.random.default_rng(2)
    x, noise = -3 + 2 * rng.normal(size=(8, 50)), rng.normal(size=(8, 50))
    sync.check_level(1, x + 0.2 * noise, x)
    with pytest.raises(SyncError, match="they share 0.7[0-9] of their spread, and at least 0.9 is usual"):
        sync.check_level(1, x + 1.0 * noise, x)
    with pytest.raises(SyncError, match="share 0.00 of their spread"):
        sync.check_level(1, x + 20, x)


# ---------------------------------------------------------------------------------------------------------------------
# Healthy engines
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_healthy_engines_are_proved_and_raise_no_alarm(fmt):
    rig = Rig(fmt, seed=3)
    statuses = []
    for _ in range(30):
        statuses.append(rig.sync().status)
        rig.step(2e-3)
    assert statuses[0] == "first"
    assert statuses[1:].count("proved") > (4 if fmt == "bfloat16" else 25)
    assert "same" not in statuses


def test_rounded_activations_of_vllm_raise_no_alarm(tmp_path, vllm_engines):
    """In bfloat16 vLLM often rounds an activation to another int8 number than the published tensors' own forward does.
    With that in dP, too, the slope of this healthy engine is 0.65 on average."""
    fmt, model = quant.format_of("int8"), tiny_model(1, layers=2, hidden=64, std=0.1)
    model.save_pretrained(tmp_path)
    engine = vllm_engines(folder=str(tmp_path), fmt=fmt, dtype="bfloat16", memory_gib=0.02)
    probe = Probe(str(tmp_path), np.random.default_rng(0).integers(2, 256, (16, 24)), fmt)
    generator, slopes = torch.Generator().manual_seed(1), []
    for version in range(10):
        published = quant.for_engine(model.state_dict().items(), model, fmt, engine.packed)
        slopes.append(prove(engine, version, published, probe).slope)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-4 * torch.randn(p.shape, generator=generator))
    assert np.mean([slope.b for slope in slopes[1:]]) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_becomes_sure_and_unsure_again_raises_no_alarm(dtype):
    """Log-probabilities of its own tokens go to 0, and the engine's rounding of them does not."""
    rig = Rig(dtype)
    rig.sync()
    own = []
    for factor in [1.3] * 14 + [1 / 1.3] * 18:
        with torch.no_grad():
            rig.model.model.norm.weight.mul_(factor)
        rig.version += 1
        rig.sync()
        own.append(float(np.nanmean(np.abs(rig.probe.decode.engine))))
    assert min(own) < 0.02 * max(own)
    assert max(own) > 1


def test_weights_that_have_not_changed_prove_nothing():
    rig = Rig("float32")
    rig.sync()
    rig.step(1e-3)
    assert rig.sync().status == "proved"
    same = rig.sync()
    assert same.status == "same"
    assert same.distance == 0


def test_steps_too_small_for_the_rounding_are_unproven_until_they_add_up():
    """bfloat16: one step cannot be seen; the slope since the last proof gets surer with every one."""
    rig = Rig("bfloat16", seed=4)
    statuses, errors = [], []
    for _ in range(60):
        proof = rig.sync()
        statuses.append(proof.status)
        errors.append(proof.slope.se)
        rig.step(2e-4)
    first = statuses.index("proved")
    assert statuses[1:first] == ["unproven"] * (first - 1)
    assert first > 3
    assert errors[first] < errors[1] / 1.5
    assert 0 < rig.probe.unproven < 60
    assert rig.probe.unproven == statuses[::-1].index("proved")


def test_a_proof_accuses_by_sampled_tokens_as_few_tokens_do(monkeypatch):
    """A slope of 0.5 +- 0.05 of them, 8 errors below the least of a new engine, stops nothing; of prompts it would."""
    rig = Rig("float32")
    rig.sync()
    rig.step(1e-3)
    monkeypatch.setattr(sync, "decode_since", lambda *_: Slope(0.5, 0.05))
    assert rig.sync().status == "unproven"
    rig.step(1e-3)
    monkeypatch.setattr(sync, "decode_since", lambda *_: Slope(0.5, 0.03))
    with pytest.raises(SyncError, match="of sampled tokens the engine shows 0.5 "):
        rig.sync()


def test_the_memory_of_a_probe_goes_through_a_checkpoint():
    rig, other = Rig("float32"), Rig("float32")
    for r in (rig, other):
        for _ in range(3):
            r.sync()
            r.step(1e-3)
    again = Probe(None, IDS, config=rig.model.config)
    again.load_state_dict(rig.probe.state_dict())
    rig.probe = again
    a, b = rig.sync(), other.sync()
    assert (a.slope, a.decode_slope, a.status, a.distance) == (b.slope, b.decode_slope, b.status, b.distance)
    assert again.start.version == 0
    assert np.array_equal(again.start.engine, other.probe.start.engine)
    assert np.array_equal(again.start.published, other.probe.start.published)
    fresh = Probe(None, IDS, config=rig.model.config)
    fresh.load_state_dict({"previous": torch.zeros(15)})  # a checkpoint of before references were kept
    assert fresh.prompt is None
    fewer = Probe(None, IDS[:5], config=rig.model.config)
    fewer.load_state_dict(again.state_dict())  # what other sequences said
    assert fewer.prompt is None and fewer.decode is None
    rig.probe = fewer
    assert rig.sync().status == "first"


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------

CASES = [(name, fmt) for name in FAULTS for fmt in FORMATS if FAULTS[name] is not scale_of_one or FORMATS[fmt][1]]


@pytest.mark.parametrize("name, fmt", CASES)
def test_planted_faults_are_found(name, fmt):
    rig = Rig(fmt)
    rig.sync()
    rig.step(1e-3)
    rig.sync()
    rig.spoil(FAULTS[name])
    every_module = 2 * len(rig.probe.modules())
    n, said = rig.syncs_until_caught(2e-2 if fmt == "bfloat16" else 1e-3, every_module)
    assert n, "never caught"
    assert "the engine" in said or "the engine's" in said


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_published_weights_that_stand_still_are_found(size):
    n, said = stands_still(size, most=2)
    assert n == 1
    assert "they are not the learner's" in said


def test_the_sentence_names_the_module_that_stayed_old():
    rig = Rig("int8")
    rig.sync()
    rig.spoil(FAULTS["one matrix skipped"])
    _, said = rig.syncs_until_caught(1e-3, most=40)
    assert "has not got the new weights of model.layers.1.mlp.down_proj" in said


def test_low_bit_publications_of_a_learner_in_full_precision_are_its_own():
    """Their change follows the learner's roughly, and only standing still is an error."""
    rig = Rig("int8")
    check = LearnerCheck(Probe(None, IDS, rig.format, config=rig.model.config), aligned=False)
    learner = HFEngine(rig.model)
    for _ in range(20):
        check(rig.version, learner.logprobs(IDS), rig.published().items())
        rig.step(1e-3)
    stale = {name: x.clone() for name, x in rig.published().items()}
    rig.step(1e-2)
    with pytest.raises(SyncError, match="they are not the learner's"):
        for _ in range(20):
            check(rig.version, learner.logprobs(IDS), stale.items())
            rig.step(1e-2)


@pytest.fixture
def engine(vllm_engine, request):
    """The suite's vLLM engine, with its own methods again at the end."""
    yield vllm_engine
    for name in ("load",):
        vllm_engine.__dict__.pop(name, None)


def test_vllm_is_proved_and_its_faults_are_found(engine, folders):
    """The real engine: healthy, never loaded, a tied head left out, prefixes of before in its cache."""
    model = tiny_model(1)
    probe = Probe(str(folders / "actor"), IDS)
    version = 0

    def step_and_sync(probe=probe):
        nonlocal version
        version += 1
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(version)))
        return prove(engine, version, model.state_dict().items(), probe)

    assert prove(engine, 0, model.state_dict().items(), probe).status == "first"
    for _ in range(6):
        proof = step_and_sync()
        assert proof.status == "proved"
        assert proof.slope.b == pytest.approx(1, abs=1e-3)
        assert proof.decode_slope.b == pytest.approx(1, abs=1e-2) or np.isnan(proof.decode_slope.b)
    load = engine.load
    engine.load = lambda tensors: [None for _ in tensors]
    with pytest.raises(SyncError, match="old weights"):
        step_and_sync()
    engine.load = lambda tensors: [next(iter(tensors))]  # stops after one tensor
    with pytest.raises(SyncError, match="consumed other tensors"):
        step_and_sync()
    engine.load = load


def test_prefixes_of_old_weights_in_the_cache_of_vllm_are_found(tmp_path, vllm_engines):
    """vLLM keeps whole blocks of prompts, 128 tokens on a CPU, and must forget them with the weights."""
    config = tiny_model(1).config
    config.max_position_embeddings = 256
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tiny_model(1).state_dict())
    model.save_pretrained(tmp_path)
    engine = vllm_engines(folder=str(tmp_path), max_len=200)
    ids = (uniforms(8 * 150, "long") * 256).astype(np.int64).reshape(8, 150)
    for healthy in (True, False):
        engine.load(model.state_dict().items())  # no prefixes of before
        if not healthy:
            engine.llm.reset_prefix_cache = lambda *args, **more: True
        probe = Probe(str(tmp_path), ids)
        caught = ""
        for version in range(6):
            try:
                status = prove(engine, version, model.state_dict().items(), probe).status
            except SyncError as e:
                caught = str(e)
                break
            assert status in (("proved", "unproven") if version else ("first",))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(version)))
        assert ("sampled tokens" in caught) != healthy, caught


def test_log_probabilities_that_are_not_numbers_are_an_error(monkeypatch):
    rig = Rig("float32")
    monkeypatch.setattr(rig.engine, "logprobs", lambda ids: np.full((16, 15), np.nan, np.float32))
    with pytest.raises(SyncError, match="are not finite"):
        rig.sync()


# ---------------------------------------------------------------------------------------------------------------------
# The probe and the digest
# ---------------------------------------------------------------------------------------------------------------------


def test_a_tied_head_left_out_is_found_out(folders):
    probe = Probe(str(folders / "actor"), IDS)
    partial = {k: v for k, v in tiny_model(7).state_dict().items() if k != "lm_head.weight"}
    with pytest.raises(SyncError, match="lm_head.weight was not published; publish the whole state dict"):
        prove(HFEngine(str(folders / "actor")), 1, partial.items(), probe)
    learner = Learner(tiny_model(7), None, make_cfg(), Comm())
    assert "lm_head.weight" in dict(learner.named_tensors("policy"))


def test_untied_models_publish_their_head(folders):
    probe, engine = Probe(str(folders / "untied"), IDS), HFEngine(str(folders / "untied"))
    prove(engine, 0, tiny_model(2, tie=False).state_dict().items(), probe)
    assert prove(engine, 1, tiny_model(3, tie=False).state_dict().items(), probe).status == "proved"


def test_the_probe_runs_the_published_tensors_alone(folders):
    probe = Probe(str(folders / "actor"), IDS)
    a, b = tiny_model(1), tiny_model(7)
    of_a = probe.logprobs(a.state_dict().items())
    assert np.allclose(of_a, HFEngine(a).logprobs(IDS), atol=1e-5)
    assert np.abs(of_a - probe.logprobs(b.state_dict().items())).max() > 0.1
    one = dict(a.state_dict())
    one["lm_head.weight"] = b.state_dict()["lm_head.weight"]  # a head that disagrees with its embedding shows
    assert np.abs(probe.logprobs(one.items()) - of_a).max() > 0.1
    assert all(p.device.type == "meta" for p in probe.model.parameters())


def test_twins_run_with_the_other_tensors_and_nothing_else_does(folders):
    """The last rows are what a model with that one module changed says."""
    probe = Probe(str(folders / "actor"), IDS)
    a, mixed = tiny_model(1), tiny_model(1)
    name = "model.layers.0.mlp.up_proj"
    other = tiny_model(7).get_submodule(name).weight.detach()
    with torch.no_grad():
        mixed.get_submodule(name).weight.copy_(other)
    rows = np.concatenate([IDS, IDS[:5]])
    says = probe.logprobs(a.state_dict().items(), rows, twins=(name, {"weight": other}, 5))
    assert np.allclose(says[:16], HFEngine(a).logprobs(IDS), atol=1e-5)
    assert np.allclose(says[16:], HFEngine(mixed).logprobs(IDS[:5]), atol=1e-5)
    assert np.abs(says[16:] - says[:5]).max() > 0.01
    assert np.allclose(probe.logprobs(a.state_dict().items()), says[:16], atol=1e-5)  # nothing stays behind


def test_smooth_rows_are_those_of_dequantized_weights(folders):
    """The first rows run without rounding activations, the others as an aligned model does, the last with a twin."""
    fmt = quant.format_of("int8")
    probe, name = Probe(str(folders / "actor"), IDS, fmt), "model.layers.0.mlp.up_proj"
    aligned, mixed = quant.align(tiny_model(1), fmt), quant.align(tiny_model(1), fmt)
    other = dict(fmt_tensors(tiny_model(7).get_submodule(name).weight.detach(), fmt))
    with torch.no_grad():
        mixed.get_submodule(name).weight.copy_(tiny_model(7).get_submodule(name).weight)
    published = list(quant.for_engine(tiny_model(1).state_dict().items(), aligned, fmt, True))
    rows = np.concatenate([IDS, IDS, IDS])
    smooth, rounded, twin = probe.logprobs(published, rows, twins=(name, other, 16), smooth=16).reshape(3, 16, -1)
    plain = tiny_model(1)
    quant.dequantize_in_place(plain, fmt)
    assert np.allclose(smooth, HFEngine(plain).logprobs(IDS), atol=1e-5)
    assert np.allclose(rounded, HFEngine(aligned).logprobs(IDS), atol=1e-5)
    assert np.allclose(twin, HFEngine(mixed).logprobs(IDS), atol=1e-5)
    assert min(np.abs(a - b).max() for a, b in ((smooth, rounded), (rounded, twin))) > 1e-3
    assert np.array_equal(probe.logprobs(published), rounded)  # nothing stays behind


def fmt_tensors(weight, fmt):
    """A linear layer's weight as it is published."""
    return zip(("weight", "weight_scale"), fmt.quantize(weight), strict=True)


def test_twins_of_a_module_that_reads_token_by_token(tmp_path):
    """A shared expert gets all rows' tokens as one list; the convolution of a mixer is never called, nor watched."""
    shape = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=48)
    a, other = (standins.model("qwen2_moe", seed, vocab_size=256, **shape) for seed in (1, 7))
    probe, name = Probe(standins.save(a, tmp_path), IDS), "model.layers.1.mlp.shared_expert.up_proj"
    assert name in probe.modules() and "model.layers.1.mlp.shared_expert_gate" not in probe.modules()
    twin = other.get_submodule(name).weight.detach()
    says = probe.logprobs(a.state_dict().items(), np.concatenate([IDS, IDS[:5]]), twins=(name, {"weight": twin}, 5))
    assert np.allclose(says[:16], HFEngine(a).logprobs(IDS), atol=1e-5)
    with torch.no_grad():
        a.get_submodule(name).weight.copy_(twin)
    assert np.allclose(says[16:], HFEngine(a).logprobs(IDS[:5]), atol=1e-5)
    assert np.abs(says[16:] - says[:5]).max() > 0.01


def test_logits_of_a_large_vocabulary_come_in_pieces(folders, monkeypatch):
    """A piece of 16 tokens and then some: what is said is the same, with the head watched too."""
    probe, model = Probe(str(folders / "untied"), IDS), tiny_model(2, tie=False)
    twins = ("lm_head", {"weight": tiny_model(7).lm_head.weight.detach()}, 5)
    rows = np.concatenate([IDS, IDS[:5]])
    whole = probe.logprobs(model.state_dict().items(), rows, twins=twins)
    engine = HFEngine(model)
    scored, learner = engine.logprobs(IDS), Learner(tiny_model(2, tie=False), None, make_cfg(), Comm())
    seen = []
    learner.models.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].ids.shape))
    learner.check_heads(IDS)
    model.register_forward_hook(lambda module, inputs, out: seen.append(out.logits.shape))
    monkeypatch.setattr("model.head.CHUNK_ELEMENTS", 40 * 256)
    assert np.allclose(probe.logprobs(model.state_dict().items(), rows, twins=twins), whole, atol=1e-5)
    assert np.abs(whole[16:] - whole[:5]).max() > 0.01
    assert np.allclose(engine.logprobs(IDS), scored, atol=1e-5)
    learner.check_heads(IDS)
    assert seen == [(16, 16)] * 2 + [(2, 16, 256)] * 8 + [(2, 16)] * 16


@pytest.mark.parametrize("name, group", [("none", 0), ("int8", 0), ("fp8", 0), ("w4a16", 32)])
def test_a_module_can_be_read_as_the_engine_started_with_it(name, group, tmp_path):
    """From the folder, in the numbers that an engine of this format computes with; a tied head is the embedding."""
    model = tiny_model(5, layers=2)
    model.save_pretrained(tmp_path)
    fmt = quant.format_of(name, group)
    probe = Probe(str(tmp_path), IDS, fmt)
    published = dict(quant.for_engine(model.state_dict().items(), model, fmt) if fmt else model.state_dict())
    modules = probe.modules()
    assert {"model.embed_tokens", "lm_head", "model.norm", "model.layers.1.mlp.down_proj"} < set(modules)
    for module in modules:
        there = probe.in_folder.tensors(module, probe.model.get_submodule(module))
        expected = {n.removeprefix(f"{module}."): x for n, x in published.items() if n.startswith(f"{module}.")}
        if "weight_packed" in expected:
            expected = {
                "weight": quant.unpacked(*(expected[f"weight_{part}"] for part in ("packed", "scale", "shape")))
            }
        assert list(there) == list(expected)
        assert all(torch.equal(there[part], expected[part]) for part in there)


@pytest.mark.parametrize("stride, rounds", [(1, 2), (2, 2), (4, 2), (5, 4), (16, 9), (100, 3)])
def test_every_module_has_its_turn_whatever_the_stride_of_versions(stride, rounds):
    """A turn is of its version alone, so that a resumed run goes on in the same way."""
    rig = Rig("float32")
    n = len(rig.probe.modules())
    turns = [rig.probe.watched(stride * i)[0] for i in range(rounds * n)]
    assert set(turns) == set(rig.probe.modules())
    assert max(turns.count(name) for name in turns) <= 2 * rounds


def test_a_probe_leaves_a_configuration_as_it_is():
    """transformers writes the precision of what it makes into it, and a checkpoint reads it there."""
    config = tiny_model(0).config
    config.dtype = torch.bfloat16
    Probe(None, IDS, config=config)
    assert config.dtype == torch.bfloat16


def test_a_folder_that_is_of_no_help_stops_nothing(tmp_path):
    """Files with other names, files that are gone, and no folder at all."""
    rig = Rig("float32")
    assert Probe(None, IDS, config=rig.model.config).watched(1)[1] == {}
    rig.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"other.{name}": x for name, x in load_file(file).items()}, file)
    assert Probe(str(tmp_path), IDS).watched(1)[1] == {}
    assert rig.probe.watched(1)[1]
    rig.sync()
    (Path(rig.folder.name) / "model.safetensors").unlink()
    assert rig.probe.watched(1)[1] == {}
    rig.step(1e-3)
    assert rig.sync().status == "proved"


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_engine_that_started_with_other_weights_than_the_first_published_is_accused_of_nothing(fmt):
    """As after a resume from a checkpoint whose probe had other sequences."""
    rig = Rig(fmt)
    rig.step(0.1)
    statuses = [rig.sync().status]
    for _ in range(60):
        rig.step(1e-3)
        statuses.append(rig.sync().status)
    assert statuses[0] == "first" and "proved" in statuses


def test_a_probe_reads_a_stream_once_in_any_order_and_holds_little_of_it(folders):
    """Tensors are taken one after the other: what waits for its turn is a module's worth, not a model's."""
    a = tiny_model(1, layers=4)
    probe = Probe(None, IDS, config=a.config)
    state = a.state_dict()
    held = []
    take = sync.Taken.take

    def watched(self, name):
        held.append(sum(x.numel() for x in self.seen.values()))
        return take(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync.Taken, "take", watched)
        forwards = probe.logprobs(iter(state.items()))
    largest = max(x.numel() for x in state.values())
    assert max(held) <= 2 * largest < sum(x.numel() for x in state.values()) / 2
    backwards = probe.logprobs(iter(list(state.items())[::-1]))
    assert np.array_equal(forwards, backwards)


def test_a_publish_and_its_proof_hold_no_more_for_a_deeper_model(tmp_path):
    """Bytes beside the learner's model and the engine's: some tensors and activations, never a second model."""
    beside = []
    for layers in (8, 16):
        model = tiny_model(0, layers=layers, hidden=128)
        model.save_pretrained(tmp_path / str(layers))
        engine, probe = HFEngine(str(tmp_path / str(layers))), Probe(str(tmp_path / str(layers)), IDS[:2])
        learner = Learner(model, None, make_cfg(objective="tis"), Comm())
        with Held() as held:
            prove(engine, 1, learner.published("policy", engine.packed), probe)
        size = sum(p.nbytes for p in model.parameters())
        beside.append(held.most - 2 * size)
    assert 0 < beside[1] <= beside[0] * 1.01
    assert beside[1] < size / 2


def test_a_saved_buffer_is_published_and_stays_where_other_tensors_lack_it():
    """A twin has the parameters that the folder has, and no buffers."""
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("angle", torch.ones(3), persistent=False)
    assert set(sync.published_of(module)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    sync.put(module, {"weight": torch.full((3,), 2.0), "running_mean": torch.full((3,), 5.0)}, torch.float32)
    sync.put(module, {"weight": torch.full((3,), 3.0)}, torch.float32)
    assert module.weight.tolist() == [3.0] * 3 and module.running_mean.tolist() == [5.0] * 3


def test_digest_sees_names_shapes_types_and_contents():
    x = torch.arange(6, dtype=torch.float32)
    base = [("a", x), ("b", x + 1)]
    streams = [
        base,
        base[::-1],
        [("a", x), ("c", x + 1)],
        [("a", x.view(2, 3)), ("b", x + 1)],
        [("a", x.double()), ("b", x + 1)],
        [("a", x), ("b", x + 1 + 1e-6)],
        [("a", x[[1, 0, 2, 3, 4, 5]]), ("b", x + 1)],  # the same numbers in another order
        base[:1],
    ]
    texts = set()
    for stream in streams:
        d = Digest()
        assert [name for name, _ in d.watch(stream)] == [name for name, _ in stream]
        texts.add(d.text())
    assert len(texts) == 8


@pytest.mark.parametrize("dtype, n", [(torch.int8, 7), (torch.bfloat16, 3), (torch.float64, 5), (torch.int64, 1)])
def test_a_digest_takes_every_byte(dtype, n):
    x = torch.arange(1, n + 1).to(dtype)
    texts = set()
    for i in range(n * x.element_size() + 1):
        raw = x.clone().view(torch.uint8)
        if i:
            raw[i - 1] ^= 1
        d = Digest()
        d.add("x", raw.view(dtype))
        assert d.nbytes == n * x.element_size()
        texts.add(d.text())
    assert len(texts) == n * x.element_size() + 1


def test_published_tensors_go_where_they_are_computed():
    """Those of a file lie on the host. What a module is called with does not matter."""
    for device, wanted in ((torch.device("meta"), "meta"), (None, "cpu")):
        module = torch.nn.Linear(2, 3)
        stream = sync.Taken([("x.weight", torch.ones(3, 2)), ("x.bias", torch.ones(3))], torch.float32, device)
        sync.fill([("x", module)], stream, module, ())
        assert {module.weight.device.type, module.bias.device.type} == {wanted} and module.weight.shape == (3, 2)
