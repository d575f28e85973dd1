"""Flags and files of flags become a configuration, under our names or another framework's."""

import math
from dataclasses import replace

import pytest
from conftest import make_cfg

import config
import flags
import presets
from config import Config, parse, resolve
from flags import UserError
from learner import Comm
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


def test_flags_of_verl():
    cfg = parse(
        [
            "--rollout=hf",
            "--rollout_is=token",
            "--rollout_is_threshold=3",
            "--rollout_rs=seq_mean_k1",
            "--rollout_rs_threshold=1.2",
            "--loss_agg_mode=seq-mean-token-mean",
            "--clip_ratio_high",
            "0.3",
        ]
    )
    assert (cfg.correction, cfg.is_cap) == ("tis", 3.0)
    assert (cfg.reject, cfg.rs_low, cfg.rs_high) == ("geo", 1 / 1.2, 1.2)
    assert cfg.reduction == "seq-mean-token-mean"
    assert cfg.clip_high == 0.3
    assert parse(["--rollout=hf", "--rollout_is=sequence"]).is_cap == 2.0  # its default at either level
    assert parse(["--rollout=hf", "--rollout_is=sequence", "--rollout_is_threshold=7"]).is_cap == 7.0


@pytest.mark.parametrize(
    "argv, want",
    [
        ("--rollout_is=token --rollout_is_threshold=0.5_5", ("icepop", "none", 0.5, 5.0)),
        ("--rollout_is_threshold=0.5_5.0 --rollout_is=sequence", ("seq_mis", "none", 0.5, 5.0)),
        ("--rollout_is=null --rollout_rs=token_k1 --rollout_rs_threshold=0.25_3", ("none", "token", 0.25, 3.0)),
        ("--rollout_is=null --rollout_rs_threshold=1.5 --rollout_rs=seq_sum_k1", ("none", "sequence", 1 / 1.5, 1.5)),
        ("--rollout_is=null --rollout_rs=seq_mean_k3 --rollout_rs_threshold=0.2", ("none", "seq_mean_k3", 0.0, 0.2)),
        ("--rollout_is=token --rollout_rs=seq_max_k2 --rollout_rs_threshold=0.3", ("tis", "seq_max_k2", 0.0, 0.3)),
        (
            "--rollout_is=null --rollout_rs=token_k1 --rollout_rs_threshold=3 --rollout_token_veto_threshold=1e-4",
            ("none", "token", 1 / 3, 3.0),
        ),
    ],
)
def test_bounds_of_verl(argv, want):
    """One bound x is 1/x .. x for ratios and 0 .. x for k3; two bounds of --rollout_is drop what lies outside."""
    cfg = parse(["--rollout=hf", *argv.split()])
    assert (cfg.correction, cfg.reject, cfg.rs_low, cfg.rs_high) == want


BOTH = "--rollout_is_threshold=0.5_5.0"


@pytest.mark.parametrize(
    "argv, want",
    [
        ("--objective=tis", ("icepop", "none", 0.5, 5.0)),
        ("--objective=seq_tis", ("seq_mis", "none", 0.5, 5.0)),
        ("--objective=decoupled_token_is", ("icepop", "none", 0.5, 5.0)),
        ("--objective=decoupled_seq_is", ("seq_mis", "none", 0.5, 5.0)),
        ("--objective=bypass_pg_token_icepop", ("icepop", "none", 0.5, 5.0)),
        ("--objective=geo_rs_seq_tis", ("seq_mis", "geo:0.9:1.1", 0.5, 5.0)),
        ("--objective=geo_rs_seq_tis --rs_low=0.7 --rs_high=2", ("seq_mis", "geo:0.7:2.0", 0.5, 5.0)),
        ("--objective=decoupled_geo_rs_seq_tis", ("seq_mis", "geo:0.999:1.001", 0.5, 5.0)),
        ("--objective=decoupled_geo_rs_token_tis", ("icepop", "geo:0.999:1.001", 0.5, 5.0)),
        ("--objective=decoupled_geo_rs --rollout_is=token", ("icepop", "geo:0.999:1.001", 0.5, 5.0)),
        ("--objective=decoupled_seq_is_rs", ("seq_mis", "sequence:0.5:2.0", 0.5, 5.0)),
        ("--objective=decoupled_k3_rs_token_tis", ("icepop", "seq_mean_k3:0.0:0.01", 0.5, 5.0)),
        (
            "--objective=decoupled_k3_rs_token_tis --rollout_rs=token_k1 --rollout_rs_threshold=4",
            ("icepop", "token:0.25:4.0", 0.5, 5.0),
        ),
        ("--rollout_is=sequence --reject=token:0.5:5,geo", ("seq_mis", "token:0.5:5,geo", 0.5, 5.0)),
    ],
)
def test_two_bounds_of_verl_are_those_of_the_objectives_weight(argv, want):
    """As there: the weight is 0 outside of them, at the level that the preset or --rollout_is says, and what is
    rejected besides keeps its bounds."""
    cfg = parse(["--rollout=hf", BOTH, *argv.split()])
    assert (cfg.correction, cfg.reject, cfg.rs_low, cfg.rs_high) == want
    assert cfg.is_cap is None


@pytest.mark.parametrize("objective", ["none", "decoupled_geo_rs", "bypass_ppo_clip", "jackpot"])
def test_two_bounds_of_no_weight_are_refused(objective):
    with pytest.raises(UserError, match="--rollout_is_threshold=0.5_5.0: .* add --rollout_is=token"):
        parse(["--rollout=hf", BOTH, f"--objective={objective}"])


def test_the_objective_of_a_file_says_what_verls_bounds_bound(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('objective = "decoupled_seq_is"\nreject = "seq_mean_k1"')
    cfg = parse(["--rollout=hf", f"--config={file}", BOTH, "--rollout_rs_threshold=1.25"])
    assert (cfg.correction, cfg.reject, cfg.rs_low, cfg.rs_high) == ("seq_mis", "geo:0.8:1.25", 0.5, 5.0)


@pytest.mark.parametrize(
    "argv, want",
    [
        ("--objective=decoupled_k3_rs --rollout_rs_threshold=0.02", ("seq_mean_k3", 0.0, 0.02)),
        ("--objective=decoupled_geo_rs --rollout_rs_threshold=1.25", ("geo", 0.8, 1.25)),
        ("--objective=decoupled_seq_is_rs --rollout_rs_threshold=4", ("sequence", 0.25, 4.0)),
        ("--objective=geo_rs --rollout_rs_threshold=1.25", ("none", 0.8, 1.25)),
        (
            "--objective=decoupled_geo_rs_token_tis --rollout_rs=seq_mean_k3 --rollout_rs_threshold=0.02",
            ("seq_mean_k3", 0.0, 0.02),
        ),
        ("--objective=decoupled_geo_rs_token_tis --rollout_rs=null", ("none", None, None)),
    ],
)
def test_one_bound_of_verl_is_of_what_the_objective_rejects_by(argv, want):
    cfg = parse(["--rollout=hf", *argv.split()])
    assert (cfg.reject, cfg.rs_low, cfg.rs_high) == want


def test_an_objectives_bounds_go_with_what_they_bound():
    """Nobody gave them who puts another correction or rejection in its place."""
    assert make_cfg(objective="decoupled_seq_is", correction="icepop").is_cap is None
    assert make_cfg(objective="decoupled_seq_is", correction="tis").is_cap == 2.0
    cfg = make_cfg(objective="decoupled_geo_rs_seq_tis", reject="token:0.5:2,geo:0.8:1.25")
    assert (cfg.is_cap, cfg.rs_low, cfg.rs_high) == (2.0, None, None)
    assert make_cfg(objective="sequence_mask", correction="tis").rs_high is None
    cfg = make_cfg(objective="spare", reject="token_k3")
    assert (cfg.rs_low, cfg.rs_high, cfg.reject_of) == (0.0, 0.1, "negative")
    assert make_cfg(objective="spare", reject="none").reject_of == "all"
    assert make_cfg(objective="spare", reject="token").rs_low == 0.9  # said anew, not replaced
    cfg = make_cfg(objective="dapo", surrogate="gspo")
    assert (cfg.clip_low, cfg.clip_high) == (3e-4, 4e-4)
    assert make_cfg(objective="token_truncate", correction="prefix_tis").is_cap == 1.0
    assert make_cfg(objective="spare", correction="tis").rs_low == 0.9  # still the rejection's


@pytest.mark.parametrize("theirs, ours", [("token", "token"), ("seq_sum", "sequence"), ("seq_mean", "geo")])
def test_verls_names_of_ratios_are_understood_wherever_they_stand(theirs, ours, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(f'reject = "{theirs}_k1"')
    argv = ["--rollout=hf", "--objective=is"]
    assert parse([*argv, f"--reject={theirs}_k1"]).reject == ours
    assert parse([*argv, f"--reject={theirs}_k1:0.5:2,token_k3"]).reject == f"{ours}:0.5:2,token_k3"
    assert parse([*argv, f"--config={file}"]).reject == ours


def test_more_flags_of_verl_and_trl():
    cfg = parse(["--rollout=hf", "--objective=decoupled_seq_is", "--rollout_is_batch_normalize=True", "--delta=4"])
    assert cfg.normalize_weights and cfg.dual_clip == 4.0


def test_flags_of_trl():
    argv = ["--vllm_importance_sampling_mode=sequence_mask", "--num_generations=4", "--epsilon=0.1"]
    cfg = parse(["--rollout=hf", *argv])
    assert (cfg.correction, cfg.rs_high) == ("seq_mis", 3.0)
    assert (cfg.group_size, cfg.clip_low, cfg.clip_high) == (4, 0.1, 0.1)
    assert parse(["--rollout=hf", "--epsilon=0.1", "--epsilon_high=0.3"]).clip_high == 0.3
    assert parse(["--rollout=hf", "--loss_type=grpo"]).reduction == "seq-mean-token-mean"
    assert parse(["--rollout=hf", "--loss_type=grpo", "--reduction=token-mean"]).reduction == "token-mean"
    for two in (["--loss_type=dr_grpo", argv[0]], ["--objective=jackpot", "--loss_type=grpo"]):
        with pytest.raises(UserError, match="and --.* both mean --objective; give one"):
            parse(["--rollout=hf", *two])
    assert parse(["--rollout=hf", "--epsilon=0.1", "--clip_low=1e-1"]).clip_low == 0.1
    cap = "--vllm_importance_sampling_clip_max=2.5"
    cfg = parse(["--rollout=hf", cap, "--vllm_importance_sampling_mode=sequence_mask"])
    assert (cfg.is_cap, cfg.rs_low, cfg.rs_high) == (None, 0.0, 2.5)
    for mode in ("token_truncate", "token_mask", "sequence_truncate"):
        cfg = parse(["--rollout=hf", cap, f"--vllm_importance_sampling_mode={mode}"])
        assert (cfg.is_cap, cfg.rs_high) == (2.5, None)
    assert parse(["--rollout=hf", "--objective=tis", "--vllm_importance_sampling_cap=2.5"]).is_cap == 2.5


def test_what_a_name_implies_does_not_replace_what_the_file_says(tmp_path):
    """TRL's one bound for both sides, its mean of means, and verl's default cap."""
    for said, given in (
        ("clip_high = 0.7", ["--epsilon=0.3"]),
        ('reduction = "token-mean"', ["--loss_type=grpo"]),
        ("is_cap = 5.0", ["--rollout_is=sequence"]),
    ):
        path = tmp_path / "x.toml"
        path.write_text(said)
        name, _, value = said.partition(" = ")
        assert str(getattr(parse(["--rollout=hf", f"--config={path}", *given]), name)) == value.strip('"')


@pytest.mark.parametrize("cap, most", [([], 3.0), (["--vllm_importance_sampling_cap=2.5"], 2.5)])
def test_trls_lower_bound(cap, most):
    """A truncated ratio is raised to it, a masked one is dropped below it."""
    for mode, correction in (
        ("token_truncate", "tis"),
        ("sequence_truncate", "seq_tis"),
        ("token_mask", "icepop"),
        ("sequence_mask", "seq_mis"),
    ):
        argv = [f"--vllm_importance_sampling_mode={mode}", "--vllm_importance_sampling_clip_min=0.4", *cap]
        cfg = parse(["--rollout=hf", *argv])
        bounds = (0.4, most, None, None) if mode.endswith("truncate") else (0, None, 0.4, most)
        assert cfg.correction == correction
        assert (cfg.is_floor, cfg.is_cap, cfg.rs_low, cfg.rs_high) == bounds


def test_trls_threshold_of_the_off_policy_mask():
    """A response with A < 0 is kept where mean log(p_inf / p_new) <= x: where g >= exp(-x)."""
    cfg = parse(["--rollout=hf", "--objective=opsm", "--off_policy_mask_threshold=0.5"])
    assert (cfg.reject, cfg.reject_of, cfg.rs_low, cfg.rs_high) == ("geo", "negative", math.exp(-0.5), math.inf)
    with pytest.raises(UserError, match="--off_policy_mask_threshold=0.5: a bound of --objective=opsm, not of tis"):
        parse(["--rollout=hf", "--objective=tis", "--off_policy_mask_threshold=0.5"])


@pytest.mark.parametrize("theirs", flags.FOREIGN)
def test_a_flag_of_another_framework_names_one_of_ours(theirs):
    assert theirs not in config.FIELDS
    assert set(flags.ours(theirs, "x")) < set(config.FIELDS)


def test_ranks_enter_the_divisibility_check():
    with pytest.raises(ValueError, match="times 3 rank"):
        resolve(Config(rollout="hf"), n_ranks=3)
    resolve(Config(rollout="hf"), n_ranks=2)


def test_a_model_of_ones_own_is_asked_what_the_embedded_ones_have(solvers):
    """The task in the same sentence; the engine computes as the learner does, unless it is told otherwise."""
    own = [f"--model={solvers / 'policy'}", "--actor=none", "--rollout=hf", "--objective=tis"]
    with pytest.raises(UserError) as e:
        parse(own)
    assert str(e.value).endswith("--task=hf:openai/gsm8k@main/train --max_tokens=4096 --lr=1e-06 --dtype=bfloat16")
    with pytest.raises(UserError, match="name them, for instance --task=hf:openai/gsm8k@main/train$"):
        parse([*own, "--max_tokens=8", "--lr=1", "--dtype=float32", "--reward=gsm8k"])
    own += ["--max_tokens=8", "--lr=1", "--task=arith"]
    for given, wanted in (
        (["--dtype=bfloat16"], "bfloat16"),
        (["--dtype=float32"], "float32"),
        (["--dtype=bfloat16", "--rollout_dtype=float32"], "float32"),
    ):
        assert parse([*own, *given]).rollout_dtype == wanted
    embedded = parse(["--rollout=hf", "--dtype=bfloat16"])
    assert (embedded.task, embedded.rollout_dtype) == ("arith", "float32")


def test_auto_actor_and_z():
    cfg = resolve(Config(rollout="hf"))
    assert cfg.actor == "base:actor"
    assert cfg.obrs_z == "exact"
    assert make_cfg(objective="jackpot").obrs_z == "bracket"
    assert make_cfg(objective="jackpot", actor="base:actor", obrs_target="new").obrs_z == "bracket"


@pytest.mark.parametrize(
    "flags, z",
    [
        (dict(delay="lognormal"), "bracket"),
        (dict(delay="lognormal", max_staleness=0), "exact"),
        (dict(samplers="zmq", bind="tcp://127.0.0.1:5555"), "bracket"),
        (dict(rollout_quant="w4a16"), "bracket"),
        (dict(rollout_quant="w4a16", learner_quant="aligned"), "exact"),
        (dict(rollout_quant="int8", learner_quant="int8"), "exact"),
        (dict(learner_quant="int8"), "bracket"),
        (dict(top_p=0.9, keep_sampling_mask="off"), "bracket"),
        (dict(top_p=0.9), "exact"),
    ],
)
def test_an_actor_that_has_moved_says_nothing_of_the_policy_that_sampled(flags, z):
    cfg = resolve(Config(rollout="hf", **flags))
    assert cfg.obrs_z == z
    assert needs_of_ref_pass(cfg, True, 1.0).exact_z == (z == "exact")
    assert needs_of_update(cfg, True, 1.0, False).exact_z == (z == "exact")
    assert needs_of_update(cfg, True, 1.0, True).distill == "forward"
    new = replace(cfg, obrs_target="new", obrs_z="bracket")
    assert needs_of_ref_pass(new, True, 1.0).topk == (0 if z == "bracket" else 20)
    if z == "bracket":
        with pytest.raises(ValueError, match="samplers that are the learner's actor"):
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


def test_numbers_that_may_be_infinite_and_those_of_a_file(tmp_path):
    assert config.parse(["--objective=tis", "--is_cap=inf"]).is_cap == math.inf
    assert config.parse(["--obrs_c2=inf"]).obrs_c2 == math.inf
    file = tmp_path / "x.toml"
    for text, words in (("lr = inf", "lr=inf: must be finite"), ("grad_clip = nan", "grad_clip=nan: must be a number")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            config.parse([f"--config={file}"])
    file.write_text("grad_clip = inf")
    assert config.parse([f"--config={file}"]).grad_clip == math.inf


def test_a_run_may_wait_for_ever():
    assert Comm.start(config.parse(["--give_up=inf"]).give_up + 1800).size == 1


def test_given_flags_that_a_run_does_not_read_are_named(capsys, monkeypatch):
    """Each row of presets.READ_WITH with what it asks for and without; a file may serve several objectives."""

    def parse(argv):
        monkeypatch.setattr("sys.argv", ["train.py", *argv])
        return config.parse()

    for _, names in presets.READ_WITH.values():
        assert set(names) <= set(config.FIELDS)
    parse(["--rollout=hf", "--objective=tis", "--actor=none", "--obrs_lambda=2", "--obrs_mask=expected", "--lr=1"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("note: --obrs_") for line in said)
    assert "--obrs_lambda: of no use in this run, which is without a --correction that uses Z" in said[0]
    assert "--obrs_mask: of no use in this run, which is without --correction=obrs or jackpot_adjusted" in said[1]
    parse(["--rollout=hf", "--config=configs/demo.toml", "--objective=tis"])  # a file's own flags are not said
    assert not capsys.readouterr().err

    pairs = {
        "--objective=tis --obrs_topk=5": "--objective=jackpot",
        "--objective=z_tis --obrs_c2=1.5": "--objective=jackpot",
        "--objective=tis --tbpo_cap=mask": "--objective=tbpo",
        "--objective=tis --auto_every=5": "--is_cap=auto",
        "--objective=tis --tbpo_neg_high=1e-3": "--objective=tbpo",
        "--objective=gspo --gepo_expectation=mean": "--objective=gepo",
        "--objective=tis --cppo_kl=k2": "--cppo_beta=0.1",
        "--objective=tis --kl_in=reward": "--kl_coef=0.1",
        "--objective=tis --guard_kl=0.1": "--guard=stop",
        "--objective=tis --lora_alpha=8": "--lora_rank=4",
        "--objective=tis --actor=none --distill_topk=5": "--actor=base:actor",
        "--objective=tis --distill_gain=0.5": "--distill_kl_target=0.01",
    }
    assert len(pairs) == len(presets.READ_WITH)
    for idle, mend in pairs.items():
        flag = idle.split()[-1].split("=")[0]
        parse(["--rollout=hf", *idle.split()])
        assert flag in capsys.readouterr().err
        parse(["--rollout=hf", *idle.split(), mend])
        assert not capsys.readouterr().err, mend


def test_a_run_is_called_by_what_it_does():
    for axes, name in {
        "--objective=jackpot": "jackpot",
        "--objective=gspo": "gspo",
        "--objective=jackpot --correction=tis": "jackpot, correction=tis",
        "--objective=gepo --surrogate=tbpo": "gepo, surrogate=tbpo",
        "--objective=grpo --ratio_base=inf": "grpo, ratio_base=inf",
    }.items():
        assert presets.called(vars(parse(["--rollout=hf", *axes.split()]))) == name


def test_vllms_word_for_all_tokens_is_understood():
    cfg = make_cfg(top_k=-1)
    assert Sampling.of(cfg).top_k == 0
    assert not Sampling.of(cfg).truncates
