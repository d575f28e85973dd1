"""Configurations from flags and files, with this repository's names or a different framework's."""

import math
from dataclasses import replace

import pytest
from conftest import make_cfg

import presets
from config import Config
from machinery import settings
from machinery.flags import UserError
from machinery.settings import parse, resolve
from model import needs_of_ref_pass, needs_of_update
from sampling import Sampling


def test_flags_and_toml_compose(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('objective = "tis"\nlr = 1\nsteps = 7\nclip = false\nis_cap = 5\n')
    cfg = parse([f"--config={path}", "--steps=9", "--rollout", "hf", "--positive-only"])
    assert cfg.objective == cfg.correction == "tis"
    assert cfg.lr == 1.0 and isinstance(cfg.lr, float)
    assert cfg.steps == 9
    assert cfg.clip is False
    assert cfg.is_cap == 5.0
    assert cfg.rollout == "hf"
    assert cfg.positive_only is True


def test_a_run_as_model_is_its_newest_checkpoint(tmp_path):
    """Also a checkpoint; the dtype is the checkpoint's."""
    run = tmp_path / "run"
    for step in ("step_000009", "step_000010"):
        for name in ("policy", "actor"):
            folder = run / "checkpoints" / step / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    (run / "config.json").write_text('{"config": {}}')
    common = ["--task=arith", "--max_tokens=9", "--lr=1e-6", "--actor_lr=1e-6", "--rollout=hf"]
    cfg = parse([f"--model={run}", f"--actor={run / 'checkpoints' / 'step_000009'}", *common])
    assert cfg.model == str(run / "checkpoints" / "step_000010" / "policy") and cfg.dtype == "bfloat16"
    assert cfg.actor == str(run / "checkpoints" / "step_000009" / "actor")


def test_a_replaced_correction_drops_the_objectives_bounds():
    """Bounds of an objective apply only to its own correction and rejection."""
    assert make_cfg(objective="decoupled_seq_is", correction="icepop").is_cap is None
    assert make_cfg(objective="decoupled_seq_is", correction="tis").is_cap == 2.0
    cfg = make_cfg(objective="decoupled_geo_rs_seq_tis", reject="token:0.5:2,geo:0.8:1.25")
    assert (cfg.is_cap, cfg.rs_low, cfg.rs_high) == (2.0, None, None)
    assert make_cfg(objective="sequence_mask", correction="tis").rs_high is None
    cfg = make_cfg(objective="spare", reject="token_k3")
    assert (cfg.rs_low, cfg.rs_high, cfg.reject_of) == (0.0, 0.1, "negative")
    assert make_cfg(objective="spare", reject="none").reject_of == "all"
    assert make_cfg(objective="spare", reject="token").rs_low == 0.9  # named again, so not replaced
    cfg = make_cfg(objective="dapo", surrogate="gspo")
    assert (cfg.clip_low, cfg.clip_high) == (3e-4, 4e-4)
    assert make_cfg(objective="token_truncate", correction="prefix_tis").is_cap == 1.0
    assert make_cfg(objective="spare", correction="tis").rs_low == 0.9  # the rejection's bound stays


def test_masks_of_the_update_are_not_known_before_it():
    target_new = ["--rollout=hf", "--objective=jackpot", "--obrs_target=new"]
    assert parse(target_new).obrs_target == "new"
    with pytest.raises(UserError, match="--loss_denominator=kept: needs weights and masks before the update"):
        parse([*target_new, "--loss_denominator=kept"])


def test_a_custom_model_needs_more_flags(solvers):
    """One sentence names all missing flags; precisions: of the engine the learner's, of this the checkpoint's."""
    common = [f"--model={solvers / 'policy'}", "--actor=none", "--rollout=hf", "--objective=tis"]
    with pytest.raises(UserError) as e:
        parse(common)
    assert str(e.value).endswith("--task=hf:openai/gsm8k@main/train --max_tokens=4096 --lr=1e-06")
    common += ["--max_tokens=8", "--lr=1", "--task=arith"]
    assert parse(common).dtype == parse(common).rollout_dtype == "float32"  # the checkpoint's
    common += ["--dtype=bfloat16"]
    assert parse(common).rollout_dtype == "bfloat16"
    assert parse([*common, "--rollout_dtype=float32"]).rollout_dtype == "float32"
    embedded = parse(["--rollout=hf", "--dtype=bfloat16"])
    assert (embedded.task, embedded.rollout_dtype, embedded.actor) == ("arith", "bfloat16", "base:actor")


@pytest.mark.parametrize(
    "flags, z",
    [
        ({}, "exact"),
        (dict(delay="lognormal"), "bracket"),
        (dict(delay="lognormal", max_staleness=0), "exact"),
        (dict(samplers="tcp://127.0.0.1:5555"), "bracket"),
        (dict(rollout_quant="w4a16"), "bracket"),
        (dict(dtype="float32", rollout_dtype="bfloat16"), "bracket"),
        (dict(dtype="bfloat16"), "exact"),
        (dict(rollout_quant="w4a16", learner_quant="aligned"), "exact"),
        (dict(rollout_quant="int8", learner_quant="int8"), "exact"),
        (dict(learner_quant="int8"), "bracket"),
        (dict(top_p=0.9, keep_sampling_mask="off"), "bracket"),
        (dict(top_p=0.9), "exact"),
        (dict(logprobs_mode="raw", temperature=0.6), "bracket"),
        (dict(logprobs_mode="raw"), "exact"),
    ],
)
def test_exact_z_needs_the_actor_that_sampled(flags, z):
    cfg = resolve(Config(rollout="hf", **flags))
    assert cfg.obrs_z == z
    assert needs_of_ref_pass(cfg, True).exact_z == (z == "exact")
    assert needs_of_update(cfg, True, False).exact_z == (z == "exact")
    assert needs_of_update(cfg, True, True).distill
    new = replace(cfg, obrs_target="new", obrs_z="bracket")
    assert needs_of_ref_pass(new, True).topk == (0 if z == "bracket" else 20)
    if z == "bracket":
        with pytest.raises(ValueError, match="samplers identical to the learner's actor"):
            resolve(Config(rollout="hf", obrs_z="exact", **flags))


def test_c2_follows_the_clip():
    def c2(**flags):
        return make_cfg(objective="jackpot", obrs_target="new", **flags).obrs_c2

    assert c2() == pytest.approx(1.30)
    assert c2(clip_high=0.7) == pytest.approx(1.72)
    assert c2(obrs_c2=3.0) == 3.0
    assert (
        c2(clip=False) == c2(surrogate="gspo") == c2(clip_high=math.inf) == 3.0
    )  # Table 8; the text's is always finite


def test_infinite_numbers_in_flags_and_files(tmp_path):
    assert settings.parse(["--objective=tis", "--is_cap=inf"]).is_cap == math.inf
    assert settings.parse(["--obrs_c2=inf"]).obrs_c2 == math.inf
    file = tmp_path / "x.toml"
    for text, words in (("lr = inf", "lr=inf: must be finite"), ("grad_clip = nan", "grad_clip=nan: must be a number")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            settings.parse([f"--config={file}"])
    file.write_text("grad_clip = inf")
    assert settings.parse([f"--config={file}"]).grad_clip == math.inf


def test_names_of_runs():
    for axes, name in {
        "--objective=jackpot": "jackpot",
        "--objective=gspo": "gspo",
        "--objective=jackpot --correction=tis": "jackpot, correction=tis",
        "--objective=gepo --surrogate=tbpo": "gepo, surrogate=tbpo",
        "--objective=grpo --ratio_base=inf": "grpo, ratio_base=inf",
    }.items():
        assert presets.called(vars(parse(["--rollout=hf", *axes.split()]))) == name


def test_vllms_top_k_of_minus_1_keeps_all_tokens():
    cfg = make_cfg(top_k=-1)
    assert Sampling.of(cfg).top_k == 0
    assert not Sampling.of(cfg).truncates
