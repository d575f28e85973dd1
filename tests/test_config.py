"""Bad input: one clear sentence that names the flag, file or line and the mend, before any model loads."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, make_cfg

import config
import objectives
import run
import warmstart
from config import Config, parse, resolve
from flags import UserError
from learner import Comm
from model import needs_of_ref_pass, needs_of_update
from sampling import Sampling
from tasks import VOCAB, make_task


def check_everything(argv) -> None:
    """All that a command line has to pass before the embedded models are made."""
    cfg = parse(["--rollout=hf", *argv])
    warmstart.check(cfg, make_task(cfg))
    run.check_vocabulary(cfg, VOCAB)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--objectve=jackpot"], "--objectve: no such flag; did you mean --objective?"),
        (["--steps=x"], "--steps=x: not a whole number"),
        (["--objective=jackpt"], "did you mean jackpot?"),
        (["--correction=tiss"], "--correction=tiss: not one of .* did you mean tis?"),
        (["--surrogate=pppo"], "did you mean ppo?"),
        (["--advantage=grp"], "--advantage=grp: not one of grpo, grpo_no_std, rloo; did you mean grpo?"),
        (["--obrs_lambda=0"], "--obrs_lambda=0.0: lambda must be above 0"),
        (["--obrs_c2=0.5"], "--obrs_c2=0.5: caps p_ref / p_tgt, so at least 1"),
        (["--base_accuracy=1.5"], "--base_accuracy=1.5: a share between 0 and 1"),
        (["--actor_base_accuracy=0"], "--actor_base_accuracy=0.0: a share between 0 and 1"),
        (["--top_p=0"], r"--top_p=0.0: a probability mass in \(0, 1\]"),
        (["--top_p=1.1"], r"--top_p=1.1: a probability mass in \(0, 1\]"),
        (["--top_k=-2"], "--top_k=-2: must be a number of tokens"),
        (["--min_p=1"], r"--min_p=1.0: a share in \[0, 1\)"),
        (["--keep_sampling_mask=replayed"], "did you mean replay?"),
        (
            ["--keep_sampling_mask=recompute", "--top_k=5"],
            "--keep_sampling_mask=recompute with an --actor: .* use replay or off",
        ),
        (["--obrs_lambda=-1"], "--obrs_lambda=-1.0: lambda must be above 0"),
        (["--obrs_accept_rate=1.5"], r"--obrs_accept_rate=1.5: a budget lies in \(0, 1\]"),
        (["--obrs_accept_rate=-0.5"], "a budget lies in"),
        (["--obrs_accept_rate=0"], "a budget lies in"),
        (["--objective=jackpot", "--is_cap=3"], "--is_cap=3.0: --correction=obrs has no cap C; use --obrs_c1"),
        (["--objective=icepop", "--is_cap=3"], "use --rs_low and --rs_high"),
        (["--objective=grpo", "--is_cap=3"], "leave it out"),
        (["--dual_clip=3", "--clip=False"], "--dual_clip=3.0: needs a value above 1"),
        (["--dual_clip=0.5"], "needs a value above 1"),
        (["--dual_clip=3", "--surrogate=sapo"], "--surrogate=ppo or gspo"),
        (["--objective=reinforce", "--ratio_base=inf"], "--surrogate=reinforce has no ratio"),
        (["--kappa=exact"], "--kappa=exact is for --obrs_target=new"),
        (["--objective=z_tis", "--obrs_target=new"], "z_tis is a control for target ref"),
        (["--distill_kl_target=0.1", "--distill_lambda=0"], "needs a --distill_lambda above 0"),
        (["--distill_topk=256"], "--distill_topk=256: must lie between 0 and the vocabulary of 256 tokens, less one"),
        (["--obrs_topk=257"], "--obrs_topk=257: K must lie between 1 and the vocabulary of 256 tokens"),
        (["--train_batch=100"], "--train_batch=100: not divisible by --group_size=8 times 1 rank"),
        (["--rollout_batch=300"], "--rollout_batch=300: not a multiple of --train_batch=256"),
        (
            ["--group_size=1", "--train_batch=4", "--rollout_batch=4"],
            "--group_size=1: an advantage needs at least 2 responses",
        ),
        (["--steps=0"], "--steps=0: must be at least 1"),
        (["--lr=0"], "--lr=0.0: must be above 0"),
        (
            ["--logprobs_mode=raw", "--top_k=5"],
            "--logprobs_mode=raw: raw log-probabilities do not show which tokens were cut, "
            "so there are no (kept|allowed) sets to replay",
        ),
        (["--top_k=257"], "--top_k=257: larger than the vocabulary of 256 tokens"),
        (
            ["--learner_quant=aligned"],
            "--learner_quant=aligned: the rollouts are not quantized, there is nothing to align with",
        ),
        (["--rollout_quant=int4"], "--rollout_quant=int4: not one of none, int8, fp8, w4a16"),
        (["--quant_group=0"], "--quant_group=0: must be at least 1"),
        (["--objective=tbpo", "--is_cap=1"], "--is_cap=1.0: tbpo_mismatch caps two-sided"),
        (["--tbpo_neg_high=0"], "--tbpo_neg_high=0.0: the band's edges"),
        (["--objective=icepop", "--reject=geo"], "--reject=geo: --correction=icepop already rejects"),
        (
            ["--objective=tis", "--rs_high=2"],
            "--rs_low=None --rs_high=2.0: nothing is rejected by bounds here; name what to bound with --reject",
        ),
        (["--objective=tis", "--reject=geo", "--rs_low=1.2"], "--rs_low=1.2 --rs_high=1.1: the bounds are crossed"),
        (["--objective=tis", "--veto=1"], r"--veto=1.0: a ratio in \[0, 1\)"),
        (["--log_ratio_clamp=0"], "--log_ratio_clamp=0.0: must be above 0"),
        (["--objective=tis", "--is_floor=2"], "--is_floor=2.0: a lower bound of a capped weight, below --is_cap=2.0"),
        (["--objective=grpo", "--is_floor=0.5"], "--correction=none has none"),
        (["--rollout_rs=seq_max_k2"], "--reject=seq_max_k2: not one of none, token"),
        (["--rs_low=3", "--rs_high=2"], "--rs_low=3.0 --rs_high=2.0: the bounds are crossed"),
        (["--objective=ppo_is", "--correction=tis"], "--ratio_base=inf already corrects"),
        (["--correction=tis_adjusted"], "needs --ratio_base=new, not ref"),
        (["--correction=jackpot_adjusted", "--ratio_base=new"], "use --obrs_target=new"),
        (["--obrs_z=exact", "--actor=none"], "--obrs_z=exact: the whole vocabulary is known only"),
        (["--loss_denominator=kept", "--obrs_target=new"], "add --kappa=exact"),
        (
            ["--objective=tis_adjusted", "--loss_denominator=kept", "--veto=1e-4"],
            "--correction=tis_adjusted is known within it; use proposed",
        ),
        (["--obrs_accept_rate=0.9", "--obrs_target=new"], "add --kappa=exact"),
        (["--distill_kl_target=0.1", "--actor=none"], "there is no actor to distil"),
        (["--model=/no/such"], "--model=/no/such: no Hugging Face model folder"),
        (["--actor=/no/such"], "--actor=/no/such: no Hugging Face model folder"),
        (["--model=base:polcy"], "did you mean base:policy?"),
        (["--task=/no/such.jsonl", "--actor=none"], "--model=base:policy knows only --task=arith"),
        (["--task_min_ops=6"], "--task_min_ops=6: must be between 1 and --task_max_ops=5"),
        (["--task_explain=-1"], "--task_explain=-1: must be 0"),
        (["--task_total=500"], "--task_total=500: must be below 200"),
        (["--max_tokens=2000"], "--max_tokens=2000: .*over the model's context of 512"),
        (["--config=/no/such.toml"], "--config=/no/such.toml: no such file"),
        (["stray"], "stray: flags are written --key=value"),
        (["--resume", "--out=/no/such/run"], "--resume: /no/such/run holds no run"),
    ],
)
def test_command_lines(argv, sentence):
    with pytest.raises(ValueError, match=sentence) as e:
        check_everything(argv)
    assert "\n" not in str(e.value)


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


@pytest.mark.parametrize(
    "argv, want",
    [
        ("--rollout_is=token --rollout_is_threshold=0.5_5", ("icepop", "none", 0.5, 5.0)),
        ("--rollout_is_threshold=0.5_5.0 --rollout_is=sequence", ("seq_mis", "none", 0.5, 5.0)),
        ("--rollout_is=null --rollout_rs=token_k1 --rollout_rs_threshold=0.25_3", ("none", "token", 0.25, 3.0)),
        ("--rollout_is=null --rollout_rs_threshold=1.5 --rollout_rs=seq_sum_k1", ("none", "sequence", 1 / 1.5, 1.5)),
        ("--rollout_is=null --rollout_rs=seq_mean_k3 --rollout_rs_threshold=0.2", ("none", "seq_mean_k3", 0.0, 0.2)),
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


def test_flags_of_trl():
    argv = ["--vllm_importance_sampling_mode=sequence_mask", "--num_generations=4", "--epsilon=0.1"]
    cfg = parse(["--rollout=hf", *argv])
    assert (cfg.correction, cfg.rs_high) == ("seq_mis", 3.0)
    assert (cfg.group_size, cfg.clip_low) == (4, 0.1)


@pytest.mark.parametrize("theirs", objectives.FOREIGN)
def test_a_flag_of_another_framework_names_one_of_ours(theirs):
    assert theirs not in config.FIELDS
    assert set(config.ours(theirs, "x")) < set(config.FIELDS)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("stps = 3", "stps: no such flag; did you mean --steps?"),
        ("lora_rank = 8", "lora_rank: no such flag; see --help"),
        ("steps = 'x'", "steps = 'x' is not of type int"),
        ("steps = true", "is not of type int"),
        ("steps = 1.5", "steps = 1.5 is not of type int"),
        ("lr = 'x'", "lr = 'x' is not of type float"),
        ("lr = true", "lr = True is not of type float"),
        ("is_cap = 'x'", "is_cap = 'x' is not of type float"),
        ("clip = 1", "clip = 1 is not of type bool"),
        ("correction = 1", "correction = 1 is not of type str"),
        ("rollout = 'hff'", "--rollout=hff: not one of vllm, hf; did you mean hf?"),
        ("steps = ", "not valid TOML"),
    ],
)
def test_bad_toml(tmp_path, text, sentence):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        parse([f"--config={path}"])


def test_ranks_enter_the_divisibility_check():
    with pytest.raises(ValueError, match="times 3 rank"):
        resolve(Config(rollout="hf"), n_ranks=3)
    resolve(Config(rollout="hf"), n_ranks=2)


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


@pytest.mark.parametrize(
    "package, flags, sentence",
    [
        ("vllm", {}, "--rollout=vllm: vLLM is not installed here.*--rollout=hf"),
        ("wandb", {"wandb": "x"}, "--wandb=x: wandb is not installed; pip install wandb, or leave the flag out"),
    ],
)
def test_missing_packages(monkeypatch, package, flags, sentence):
    real = importlib.util.find_spec

    def find_spec(name, *args):
        """vLLM is here and wandb is not, or the other way round, whatever is installed."""
        return None if name == package else name in ("vllm", "wandb") or real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ValueError, match=sentence):
        resolve(Config(**flags))


def test_models_that_do_not_fit(folders, tmp_path):
    data = json.loads((folders / "actor" / "config.json").read_text())
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**data, "vocab_size": 100}))
    with pytest.raises(ValueError, match="its vocabulary has 100 tokens and the policy's 256"):
        run.check_models(make_cfg(), str(folders / "policy"), str(small))
    with pytest.raises(ValueError, match="--obrs_topk=300: K must lie between 1 and the vocabulary of 256"):
        run.check_models(make_cfg(objective="jackpot", obrs_topk=300), str(folders / "policy"), None)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 64}, {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}]
)
def test_weights_that_do_not_fit(folders, tmp_path, changes):
    wrong = tmp_path / "wrong"
    shutil.copytree(folders / "policy", wrong)
    data = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**data, **changes}))
    with pytest.raises(ValueError, match="its weights do not fit its config.json"):
        run.load_model(str(wrong))


@pytest.mark.parametrize(
    "flag, words", [("--obrs_lambda=0", "lambda must be above 0"), ("--objective=jackpt", "jackpot?")]
)
def test_the_command_says_it_in_one_line(tmp_path, flag, words):
    """The real command: a status that is not 0, one line, no traceback, and nothing loaded or written."""
    done = subprocess.run(
        [sys.executable, "train.py", flag, f"--out={tmp_path}/x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_prompts_and_tokenizers_are_checked_before_models_load(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_model", None)
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"problem": "1 + " * 100, "answer": "1"}) + "\n")
    base = dict(model=str(folders / "policy"), objective="grpo", out=str(tmp_path / "run"), max_tokens=8)
    long = r"--max_tokens=8: the longest prompt has 2\d\d tokens, together more than the model's context of 128"
    with pytest.raises(ValueError, match=long):
        run.open_run(make_cfg(**base, task=str(file)), Comm())
    file.write_text('{"problem": "1", "answer": "1"}\n{"problem": "2"}\n')
    with pytest.raises(ValueError, match="long.jsonl, line 2: no `answer`"):
        run.open_run(make_cfg(**base, task=str(file)), Comm())
    other = tmp_path / "other"
    shutil.copytree(folders / "actor", other)
    data = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(data.replace("<spare0>", "<changed>"))
    with pytest.raises(ValueError, match="its tokenizer differs from the policy's"):
        run.open_run(make_cfg(**{**base, "actor": str(other)}), Comm())


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (dict(obrs_topk=257, actor="none"), "--obrs_topk=257: K must lie between 1 and the vocabulary of 256 tokens"),
        (dict(top_k=257), "--top_k=257: larger than the vocabulary of 256 tokens"),
        (dict(distill_topk=256), "--distill_topk=256: must lie between 0 and the vocabulary of 256 tokens, less one"),
        (dict(max_tokens=2000), "--max_tokens=2000: .*over the model's context of 512"),
    ],
)
def test_sizes_are_checked_before_the_embedded_models_are_made(tmp_path, monkeypatch, flags, sentence):
    """Making them takes minutes."""
    monkeypatch.setattr(warmstart, "base_model", None)
    cfg = make_cfg(objective="jackpot", out=str(tmp_path / "run"), **{"actor": "base:actor", **flags})
    with pytest.raises(ValueError, match=sentence):
        run.open_run(cfg, Comm())
    assert not (tmp_path / "run").exists()


def test_c2_follows_the_clip():
    def c2(**flags):
        return make_cfg(objective="jackpot", obrs_target="new", **flags).obrs_c2

    assert c2() == pytest.approx(1.30)
    assert c2(clip_high=0.7) == pytest.approx(1.72)
    assert c2(obrs_c2=3.0) == 3.0
    assert c2(clip=False) == c2(surrogate="gspo") == 3.0  # Table 8; the text's is always finite


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--lr=inf", "--lr=inf: must be finite"),
        ("--lr=nan", "--lr=nan: not a number"),
        ("--is_cap=nan", "--is_cap=nan: not a number"),
        ("--temperature=inf", "--temperature=inf: must be finite"),
        ("--clip_low=inf", "--clip_low=inf: must be finite"),
        ("--obrs_lambda=inf", "--obrs_lambda=inf: must be finite"),
        ("--distill_lambda=inf", "--distill_lambda=inf: must be finite"),
        ("--objective=tis --is_cap=0", "--is_cap=0.0: a cap of weights, above 0"),
        ("--objective=tis --is_cap=-1", "--is_cap=-1.0: a cap of weights, above 0"),
        ("--actor_is_cap=-2", "--actor_is_cap=-2.0: a cap of weights, above 0"),
        ("--warmup_steps=-3", "--warmup_steps=-3: must not be negative"),
        ("--save_every=-1", "--save_every=-1: must not be negative"),
        ("--top_k=-2", "--top_k=-2: must be a number of tokens; 0 or -1 keeps all"),
        ("--give_up=nan", "--give_up=nan: not a number"),
    ],
)
def test_numbers_that_no_run_can_use(argv, words):
    with pytest.raises(UserError) as error:
        config.parse(argv.split())
    assert str(error.value).startswith(words)


def test_numbers_that_may_be_infinite_and_those_of_a_file(tmp_path):
    assert config.parse(["--objective=tis", "--is_cap=inf"]).is_cap == math.inf
    assert config.parse(["--obrs_c2=inf"]).obrs_c2 == math.inf
    file = tmp_path / "x.toml"
    for text, words in (("lr = inf", "lr=inf: must be finite"), ("grad_clip = nan", "grad_clip=nan: not a number")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            config.parse([f"--config={file}"])
    file.write_text("grad_clip = inf")
    assert config.parse([f"--config={file}"]).grad_clip == math.inf


def test_vllms_word_for_all_tokens_is_understood():
    cfg = make_cfg(top_k=-1)
    assert Sampling.of(cfg).top_k == 0
    assert not Sampling.of(cfg).truncates
