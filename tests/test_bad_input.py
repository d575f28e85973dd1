"""Bad input: one sentence with the flag, file or line, and the fix; immediately; no file written or deleted.

A row is a command line and the words of its sentence (` ... ` stands for any text). Files that a row names are made
from bad_files.py in a new folder. forked.py runs the command like a user.
"""

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_files import FILES, MODELS, make_file
from conftest import ROOT
from forked import Job, run_jobs

from machinery.flags import UserError
from machinery.run import LOCK
from machinery.settings import parse

pytestmark = pytest.mark.timeout(600)  # the first row waits for the answers to all rows
SECONDS = 3.0  # processor time of an answer; three times as much wall time on a busy machine


OWN = "--task=arith --max_tokens=8 --lr=1 --dtype=float32"  # flags that a custom model needs


def rows(command: str, table: str) -> list[tuple[str, str]]:
    """(command line, words) of each line of a table. Words in capitals come before the command."""
    table_rows = []
    for line in table.strip("\n ").splitlines():
        arguments, words = re.fullmatch(r"(.*?) ?\| (.*)", line).groups()
        first = re.match("([A-Z_0-9]+=[^ ]+ )*", arguments + " ").group()
        table_rows.append((f"{first}{command} {arguments[len(first) :]}".strip(), words))
    return table_rows


ROWS = [
    *rows(
        "train.py --rollout=hf",
        r"""
--objectve=jackpot | --objectve: no such flag; did you mean --objective?
--actor_rollout_ref.rollout.n=8 | --actor_rollout_ref.rollout.n: no such flag; here it is --group_size
--steps=99999999999999999999 | --steps=99999999999999999999: must be between 1 and 1e+09
--arith=seed=５ | --arith=seed=５: seed=５: must be a whole number, 0 or more
--steps=0 | --steps=0: must be between 1 and 1e+09
--arith=seed=x | --arith=seed=x: seed=x: must be a whole number, 0 or more
--objective=is --reject=token:1e-300:1e-290 | --reject=token:1e-300:1e-290: the bounds of token:1e-300:1e-290 are
--objective=is --reject=token:x:5 | --reject=token:x:5: token:x:5 is not a statistic with two bounds
--objective=jackpt | --objective=jackpt: not one of none, grpo, reinforce, is, tis, ... did you mean jackpot?
--kv_cache_dtype=fp8 | --kv_cache_dtype=fp8: only vLLM has this cache; use --rollout=vllm, or auto
--objective=is --reject=token,gee:0:1 | --reject=gee: not one of token, sequence, geo, ... did you mean geo?
--objective=is --reject=geo:0:1,token --rs_high=2 | --rs_low=None --rs_high=2.0: ... or give each statistic its bounds
--objective=tis --correction_target=new | --correction_target=new: weights p_new / p_inf replace ... not ref
--objective=opsm --loss_denominator=kept | --loss_denominator=kept: ... --correction_target=new and
--kernels=liger | --kernels=liger: its kernels run on a GPU; use --kernels=plain
--kernels=compile --rollout_quant=int8 --learner_quant=int8 | --kernels=compile: the low-bit layers
--distill_lambda=200 --distill_kl_target=0.1 | --distill_lambda=200.0: --distill_kl_target starts from it
--lora_rank=4 --learner_quant=int8 | --lora_rank=4: --learner_quant=int8 computes on low-bit ... leave one of the two
--arith=total=500,operand=40 | --arith: total=500: must be below 200 and no less than operand=40
--objective=jackpot --is_cap=3 | --is_cap=3.0: --correction=obrs has no cap C; leave it out
--objective=tbpo --is_cap=1 | --is_cap=1.0: tbpo_mismatch clamps to [1/C, C], so C must be above 1
--dual_clip=3 --clip=False | --dual_clip=3.0: needs a value above 1 (3 is ... ue and --surrogate=ppo or gspo
--objective=reinforce --ratio_base=inf | --ratio_base=inf: --surrogate=reinforce has no ratio; use --surrogate=ppo
--obrs_lambda=1.4 --obrs_accept_rate=0.9 | --obrs_lambda=1.4: --obrs_accept_rate=0.9 ... leave out one of the two flags
--objective=jackpot --obrs_target=new --obrs_accept_rate=0.9 | --obrs_accept_rate=0.9: needs weights and masks before
--objective=z_tis --obrs_target=new | --correction=z_tis is a control for target ref; leave --obrs_target=ref
--distill_kl_target=0.1 --actor=none | --distill_kl_target: there is no actor to distil; name one with --actor
--train_batch=100 | --train_batch=100: not divisible by --group_size=8 times 1 rank(s)
--rollout_batch=300 | --rollout_batch=300: not a multiple of --train_batch=256
--group_size=1 --train_batch=4 --rollout_batch=4 | --group_size=1: must be between 2 and 1e+06
--logprobs_mode=raw --top_k=5 | --logprobs_mode=raw: raw ... use processed, or --keep_sampling_mask=off
--keep_sampling_mask=recompute --top_k=5 | --keep_sampling_mask=recompute with an --actor, --kl_coef or --cppo_beta:
--objective=gepo --actor=none --cppo_beta=0.1 --keep_sampling_mask=recompute --top_k=5 | --keep_sampling_mask=recompute
--objective=spare --advantage=otb | --advantage=otb: --reject_of=negative and --correction=vespo need the signs
--learner_quant=aligned | --learner_quant=aligned: the rollouts are ... name a --rollout_quant, or name the learner's
--objective=icepop --reject=geo | --reject=geo: --correction=icepop ... --reject=geo:LOW:HIGH, or use --reject=none
--objective=tis --rs_high=2 | --rs_low=None --rs_high=2.0: no statistic ... add --reject=NAME, one of token,
--objective=tis --is_floor=2 | --is_floor=2.0: must be 0, or below --is_cap=2.0
--objective=grpo --reject=token --reject_of=positive | --reject_of=positive: ... all, negative
--obrs_z=exact --actor=none | --obrs_z=exact: Z can be computed exactly only with an ... use bracket
--loss_denominator=kept --obrs_target=new | --loss_denominator=kept: ... compute them during it; leave this flag out
--objective=tis_adjusted --loss_denominator=kept --reject=seq_min | --loss_denominator=kept: needs weights and masks
--delay=lognormal --delay_min=50 --delay_max=20 | --delay_min=50.0 ... ve 0 and not above the longest
--delay=weibull --delay_min=20 --delay_max=20 | --delay=weibull: two quantiles need ... use --delay=constant
--delay=constant --max_staleness=2 --sync_every=8 | --max_staleness=2: with --sync_every=8 ... broadcast more often
--delay=constant --samplers=x | --delay=constant simulates samplers ... leave out one of
--max_staleness=8 | --max_staleness=8 --sync_every=1: there are no ... name a distribution with --delay, or a
--samplers=tcp://*:5555 | --samplers=tcp://*:5555: samplers on other hosts need --keys ... listen on tcp://127.0.0.1:
--task=fine.jsonl | --model=base:policy knows only --task=arith; give a model's folder for fine.jsonl
--model=POLICY --task=fine.jsonl --max_tokens=8 --lr=1 --dtype=float32 --arith=seed=5 | --arith=seed=5: settings of
--resume --overwrite --out=run | --resume with --overwrite: --resume continues the run, --overwrite deletes it; leave
WITHOUT=vllm --rollout=vllm | --rollout=vllm: vLLM is not installed here; ... install it (make demo does), or
--model=/no/such | --model=/no/such: no Hugging Face ... give a folder as save_pretrained writes it, or base:policy
--model=POLICY --actor=ACTOR --max_tokens=9 | --model=POLICY: these ... --task=hf: ... --lr=1e-06 --actor_lr=1e-06
HF_HUB_OFFLINE=1 --model=Qwen/Qwen3-0.6B --task=arith --lr=1 --dtype=float32 --max_tokens=8 | --model=Qwen ... no such
WORLD_SIZE=0 | WORLD_SIZE=0 in the environment: must be at least 1; unset it
RANK=3 LOCAL_RANK=3 --out=fine.jsonl | --out=fine.jsonl: a file, not a folder
--model=base:polcy | --model=base:polcy: not one of base:policy, base:actor; did you mean base:policy?
--config=cut.toml | --config=cut.toml: not valid TOML (Invalid value (at end of document)); fix that line
--config=unreadable.toml | unreadable.toml: Permission denied; name a different path
        """,
    ),
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN}",
        r"""
--task=. | --task=.: a folder; give `arith` or the path of a JSONL, JSON or Parquet file
--task=empty.jsonl | empty.jsonl: no problems in the file; a row needs `problem` ... and `answer`
--task=cut.jsonl | cut.jsonl, line 2: not valid JSON (Unterminated ... fix or remove that line, one object a line
--task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a number; add one
--task=brackets.jsonl | brackets.jsonl, line 1: not valid JSON ... fix or remove that line, one object a line
--task=latin1.jsonl | latin1.jsonl: not a text file in UTF-8 (byte 54); convert it
--task=packed.jsonl.gz | --task=packed.jsonl.gz: a packed file; unpack it with gunzip
--eval_task=nowhere.jsonl | --eval_task=nowhere.jsonl: no such file; give the path of a JSONL, JSON or Parquet file
--task=hf:gsm8k | --task=hf:gsm8k: write hf:NAME/SPLIT, such as hf:openai/gsm8k@main/train
--task=fine.parquet | fine.parquet: not a complete Parquet file ... copy it again
--task=cut.json | cut.json, line 5: not valid JSON (Expecting ',' delimiter); fix this place in the array
--task=nosuch.py:Task | --task=nosuch.py:Task: cannot be loaded (FileNotFoundError: ... nosuch.py'); fix the file
--task=fine.jsonl --reward=math*x | --reward=math*x: x is not a weight; write NAME*0.5
--task=fine.jsonl --reward=mth | --reward=mth: not one of math, gsm8k, ... did you mean math?
--task=fine.jsonl --reward=own.py:f,b/own.py:f | --reward=own.py:f,b/own.py:f: the same part is named twice; leave one
--task=fine.jsonl --reward=own.py:nosuch | --reward=own.py:nosuch: cannot be loaded (AttributeError ... fix the file
--task=fine.jsonl --columns=prompt=nosuch | fine.jsonl, line 1: no `nosuch` text; add one
--task=fine.jsonl --prompt_template=Q | --prompt_template=Q: must contain {problem} exactly once, or be one of
--task=fine.jsonl --chat_template=nosuch | --chat_template=nosuch: no such file; give auto, off, or a file of Jinja
--task=fine.jsonl --chat_kwargs=x | --chat_kwargs=x: write NAME=VALUE, separated by commas, such as
--task=fine.jsonl --max_prompt_tokens=1 | --max_prompt_tokens=1: every prompt of fine.jsonl is longer; the shortest
--eval_task=fine.jsonl:n=4 | --eval_task=fine.jsonl:n=4: no such setting; the settings are samples=
--eval_task=fine.jsonl,fine.jsonl | --eval_task=fine.jsonl,fine.jsonl: two sets have the same name; leave one out
--epochs=2 --steps=5 | --epochs with --steps: both set the length of the run; leave out one of the two flags
--epochs=2 --dynamic_sampling=3 | --epochs with --dynamic_sampling: the number of groups per update is not known; give
--rollout_quant=w4a16 --quant_group=7 | --quant_group=7: model.layers.0.self_attn.q_proj has ... choose a divisor
--model=no_config | --model=no_config: no Hugging Face model folder ... give a folder as save_pretrained writes it, or
--model=config_cut | config_cut/config.json: not valid JSON (Unterminated ... give a complete folder of a causal
--model=new_type | new_type: its config.json cannot be read (The checkpoint you ... give a complete folder of a causal
--actor=small_vocabulary --actor_lr=1 | small_vocabulary: its tokenizer has ... a vocab_size of 100; give the model the
--model=no_tokenizer | no_tokenizer: its tokenizer has no ... copy tokenizer.json and tokenizer_config.json of this
--actor=other_words --actor_lr=1 | --actor=other_words: its ... actor and policy must share one vocabulary
--model=no_weights | no_weights: no weights there (model.safetensors is ... copy the folder again, or delete it
--model=weights_cut | weights_cut/model.safetensors: its weights cannot be ... copy the folder again, or delete it
LOADS=1 --model=wider | wider: its weights do not fit its config.json ... give a complete checkpoint of that shape
--out=read_only/run | --out=read_only/run/metrics.jsonl: no file can be written there; name a different path
--out=run | --out=run already holds a run: add ... --overwrite to delete it, or name a different folder
--out=run_of_a_model --overwrite | --out=run_of_a_model: its config.json is not from a run; name a different folder
--out=notes --overwrite | --overwrite: --out=notes holds files but no run; name a different folder
--out=run --overwrite --task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a ... add one
--samplers=tcp://127.0.0.1:99999 | --samplers=tcp://127.0.0.1:99999: write tcp://HOST:PORT, with a port from 0 to 65535
--keys=keys_learner --samplers=tcp://203.0.113.1:5555 | --samplers=tcp://203.0.113.1:5555: Cannot ... name a free
--samplers=tcp://127.0.0.1:5555 --keys=keys_cut | --keys: keys_cut/learner.key_secret is not a file of keys; copy it
        """,
    ),
    *rows(
        "eval.py",
        r"""
| --model is empty: name a run folder, a checkpoint or a Hugging Face folder
--model=/no/such | --model=/no/such: no model there; ... a checkpoint, a Hugging Face folder or a GGUF file
--model=config_cut --rollout=hf | config_cut/config.json: not valid JSON ... copy it again, or name a different folder
--model=POLICY --rollout=hf | --model=POLICY: these flags have no default for a custom model; ... --max_tokens=4096
        """,
    ),
    *rows(
        "worth.py --rollout=hf --model=POLICY --actor=none --task=arith --max_tokens=8 --rollout_dtype=float32",
        r"""
--rows='jackpot obrs_topk=5; z_tis obrs_topk=6' | --rows: the rows have different --obrs_topk; measure ... separate runs
--rows=tis --advantage=otb | --advantage=otb: g is computed without a ref pass
--keep_sampling_mask=recompute --top_p=0.9 | --keep_sampling_mask=recompute: shifted weights ... use replay or off
--rollout_quant=int8 --learner_quant=aligned | --learner_quant=aligned: shifted weights cannot ... use none
        """,
    ),
    *rows(
        "eval.py --rollout=hf --model=POLICY --max_tokens=8",
        r"""
--k=1,9 | --k=1,9: each k must be between 1 and --samples=4, as in 1,4
--role=actor | --role=actor: ... is a single model, not a run or a checkpoint; leave the flag out
--exact | --exact=True: an evaluation has no learner; use python -m probe
--rollout_tp=2 | --rollout_tp=2: eval.py has one rank; leave the flag out
--out=. | --out=.: no file can be written there; name a different path
--out=answers/x.json | --out=answers/x.json: answers/x.responses.jsonl exists and is not from eval.py; name a
--top_k=300 | --top_k=300: larger than the vocabulary ... 256 tokens; 0 keeps all
        """,
    ),
    *rows(
        "-m probe --rollout=hf --model=POLICY --max_tokens=8 --dtype=float32",
        r"""
--actor=ACTOR --rollout_quant=int8 --learner_quant=aligned | --learner_quant, --router_replay: ... leave out
        """,
    ),
    *rows(
        "-m machinery.plot",
        r"""
| name at least one run folder: python -m machinery.plot out/demo
nowhere | nowhere/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
metrics_junk | metrics_junk/metrics.jsonl, line 1: not valid JSON; remove that line
run --out=read_only/x.png | --out=read_only/x.png: no file can be written there; name a different path
--samples=nowhere | nowhere/samples.jsonl: no such file; give the folder of a run of train.py
        """,
    ),
    *rows(
        "-m remote --connect=tcp://127.0.0.1:9 --name=box --rollout=hf",
        r"""
--keys=/no/such | --keys=/no/such: no learner.key there; ... copy the folder that `python -m remote.keys`
--keys=keys_sampler_public | --keys=keys_sampler_public: no secret key in ... copy it again, or make new keys
--rollout_tp=2 | --rollout_tp=2: a sampler has one rank; leave the flag out
--task=POLICY/config.json,POLICY/config.json --connect=/no/such | --connect=/no/such: neither an address
--task=/no/such.jsonl | --task=/no/such.jsonl: no such file; copy the learner's file here and name it with --task
        """,
    ),
    *rows(
        "",
        r"""
train.py --resume --out=/no/such/run | --resume: /no/such/run holds no run; start without --resume, or name its folder
train.py --resume --out=run --lr=0.5 | --resume with a changed configuration: ... or start a new run in a different
train.py --resume --out=run_spoilt | run_spoilt/checkpoints/step_000002 is damaged ... delete it and resume
-m remote.keys | name one new folder: python -m remote.keys keys --samplers=4
-m remote.keys k --samplers=0 | --samplers=0: must be at least 1
-m remote.keys keys_learner | keys_learner is not empty: keys are not overwritten; name a new folder
-m remote --rollout=hf --name=box --connect=tcp://10.0.0.1:5555 | --connect=tcp://10.0.0.1:5555: ... `python -m
mini.py --stps=3 | --stps=3: write --name=value; mini.py has the names
-m bench --parts=haed --device=cpu | --parts=haed: no such part; there are engine
-m remote | --connect: name the learner's address, tcp://HOST:PORT, or a shared folder
results/sweep.py | no study: no such study; name one of jackpot, tis, praxis, qarl, real, pair, heterorl, worth
        """,
    ),
]


def tree(folder: Path) -> dict[str, tuple]:
    """Every file below a folder, except locks, with its permissions and bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK]
    digest = {path: hashlib.sha256(path.read_bytes() if os.access(path, os.R_OK) else b"") for path in files}
    return {str(path.relative_to(folder)): (path.stat().st_mode, digest[path].hexdigest()) for path in files}


@pytest.fixture(scope="module")
def prepared(folders, tmp_path_factory):
    """A function that makes a row's job: a new folder with the files that the row names."""
    MODELS.update(POLICY=folders / "policy", ACTOR=folders / "actor")

    def prepare_job(command: str) -> Job:
        here = tmp_path_factory.mktemp("row")
        for name, content in FILES.items():
            if re.search(rf"(?<![\w./]){re.escape(name)}(?![\w.])", command):
                make_file(here / name, content)
        words = [with_models(word) for word in shlex.split(command)]
        environment = {}
        while re.match("[A-Z_0-9]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        return Job(environment, words, here, tree(here))

    return prepare_job


def with_models(text: str) -> str:
    for name, folder in MODELS.items():
        text = text.replace(name, str(folder))
    return text


@pytest.fixture(scope="module")
def answers(prepared, request):
    """{command: (job, outcome)} of each selected row. Rows without an environment share a process."""
    tested = [item for item in request.session.items if item.path == request.path]
    rows = [item for item in tested if item.originalname == "test_a_row_gets_one_sentence"]
    jobs = {command: prepared(command) for command in (item.callspec.params["command"] for item in rows)}
    shared = [command for command in jobs if not jobs[command].environment]
    outcomes = dict(zip(shared, run_jobs([jobs[command] for command in shared]), strict=True))
    return {command: (job, outcomes.get(command) or run_jobs([job])[0]) for command, job in jobs.items()}


@pytest.mark.parametrize("command, words", ROWS)
def test_a_row_gets_one_sentence(answers, command, words):
    job, done = answers[command]
    text = job.said()
    assert done.status == 1, (done.status, text[-2000:])
    assert text.startswith("error: ") and len(text.splitlines()) == 1, text[-2000:]
    at = 0
    for part in with_models(words).split(" ... "):
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)
    assert len(text) < 700
    assert done.processor < SECONDS and done.clock < 3 * SECONDS
    assert tree(job.here) == job.before


OUT_OF_BOUNDS = """
--steps=0 --rollout_batch=0 --train_batch=-1 --group_size=0 --max_tokens=0 --micro_tokens=0 --eval_problems=0 --keep=0
--lr=-1 --lr=2 --actor_lr=0 --grad_clip=1e-10 --weight_decay=1e9 --warmup_steps=-1 --save_every=-1 --epochs=-1
--dynamic_sampling=-1 --eval_every=-2 --distill_kl_target=-1 --temperature=1e-3 --temperature=1e9 --top_p=0 --top_p=1.1
--top_k=-2 --min_p=1 --min_p=-0.1 --quant_group=0 --clip_low=-0.1 --dual_clip=1 --tbpo_neg_high=0 --cppo_beta=-1
--gepo_defence=-1 --distill_lambda=-1 --kl_coef=-1 --entropy_coef=-1 --log_ratio_clamp=0 --is_cap=0.001 --is_floor=-1
--obrs_c1=1e-9 --obrs_c2=0.9 --obrs_lambda=1e9 --obrs_accept_rate=0 --obrs_accept_rate=1.1 --obrs_topk=0 --delay_min=-1
--delay_samplers=0 --step_seconds=0 --max_staleness=-1 --window_seconds=0 --sync_every=0 --give_up=0
--rollout_memory=-1 --rollout_tp=0 --lora_rank=-1 --overlong=32 --max_prompt_tokens=-1 --seed=-1
"""


def test_numbers_out_of_bounds():
    for word in OUT_OF_BOUNDS.split():
        with pytest.raises(UserError) as e:
            parse(["--rollout=hf", word])
        assert str(e.value).startswith(word.partition("=")[0]), word


@pytest.mark.parametrize("command", ["train.py --rollout=hf --steps=0", "-m remote.keys k --samplers=0"])
def test_a_separate_process_gives_the_same_answer(prepared, command):
    """A separate process, with its imports, gives the status and the sentence of a fork."""
    assert command in dict(ROWS)
    job, real_job = prepared(command), prepared(command)
    done = run_jobs([job])[0]
    argv = job.argv if job.argv[0] == "-m" else [str(ROOT / job.argv[0]), *job.argv[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT) * (argv[0] == "-m")}
    options = {"cwd": real_job.here, "env": env, "capture_output": True, "text": True, "timeout": 60}
    real = subprocess.run([sys.executable, *argv], **options)
    assert (real.returncode, real.stderr) == (done.status, job.said())
    assert tree(real_job.here) == real_job.before


def test_an_environment_of_torchrun(tmp_path):
    """Ranks that cannot meet. A separate process, which reads the number of ranks when modules load."""
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}
    options = {"env": {**os.environ, **ranks}, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, ROOT / "train.py", "--rollout=hf"], **options)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: MASTER_ADDR=localhost MASTER_PORT=x in the environment: the ranks cannot")
    assert not tree(tmp_path)


def test_closed_streams(tmp_path):
    """A service without standard streams: output is dropped, no file gets a stream's number, the status is kept."""
    code = "import sys; sys.argv = ['eval.py']; import machinery.startup; file = open(sys.orig_argv[-1], 'w'); "
    code += "sys.stdout.write('lost'); file.write(str(file.fileno())); sys.exit('status')"
    argv = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "status\n")
    assert int((tmp_path / "file").read_text()) > 2


def test_ctrl_c_while_modules_load():
    """No traceback; the shell sees a process ended by SIGINT."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
    process = subprocess.Popen(
        [sys.executable, "train.py", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, inherited)
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_libraries_warn_only_with_verbose():
    """Warnings of torch and vLLM would hide warnings of this repository."""
    code = "import sys; sys.argv = sys.argv[1:]; import machinery.startup, warnings; print(sys.argv[1:]); "
    code += "exec(compile('warnings.warn(chr(97))', 'x', 'exec'), {'warnings': warnings, '__name__': 'torch.x'})"
    for argv, warning in ((["eval.py", "--k=2"], ""), (["eval.py", "--verbose", "--k=2"], "UserWarning: a")):
        done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.stdout, warning in done.stderr, bool(warning)) == ("['--k=2']\n", True, bool(done.stderr))
