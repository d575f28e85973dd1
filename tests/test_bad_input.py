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
from bad_files import FILES, HELD, MODELS, make_file
from conftest import ROOT
from forked import Job, run_jobs

pytestmark = pytest.mark.timeout(600)  # the first row waits for the answers to all rows
SECONDS = 3.0  # processor time of an answer; three times as much wall time on a busy machine


# ---------------------------------------------------------------------------------------------------------------------
# The rows: arguments | words of the sentence
# ---------------------------------------------------------------------------------------------------------------------


OWN = "--task=arith --max_tokens=8 --lr=1 --dtype=float32"  # flags that a custom model needs


def rows(command: str, table: str) -> list[tuple[str, str]]:
    """(command line, words) of each line of a table. Words in capitals come before the command."""
    table_rows = []
    for line in table.strip("\n ").splitlines():
        arguments, words = re.fullmatch(r"(.*?) ?\| (.*)", line).groups()
        first = re.match("([A-Z_]+=[^ ]+ )*", arguments + " ").group()
        table_rows.append((f"{first}{command} {arguments[len(first) :]}".strip(), words))
    return table_rows


ROWS = [
    # train.py: flags, without a model
    *rows(
        "train.py --rollout=hf",
        r"""
--objectve=jackpot | --objectve: no such flag; did you mean --objective?
--steps=x | --steps=x: must be a whole number
--steps=1.5 | --steps=1.5: must be a whole number
--steps=1e3 | --steps=1e3: must be a whole number
--steps= | --steps=: must be a whole number
--steps | --steps: a value is missing; write --steps=VALUE
--steps=1_000 | --steps=1_000: must be a whole number
--steps=None | --steps=None: must be a whole number
--steps=inf | --steps=inf: must be a whole number
--steps=0 | --steps=0: must be at least 1
--steps=99999999999999999999 | --steps=99999999999999999999: must have at most 18 digits
--seed=0x10 | --seed=0x10: must be a whole number
--lr=x | --lr=x: must be a number
--lr=nan | --lr=nan: must be a number
--lr=inf | --lr=inf: must be finite
--lr=1e400 | --lr=inf: must be finite
--lr=-1e-4 | --lr=-0.0001: must be above 0
--lr=1,5e-4 | --lr=1,5e-4: must be a number
--lr=1e-4.0 | --lr=1e-4.0: must be a number
--actor_lr=0 | --actor_lr=0.0: must be above 0
--clip=yes | --clip=yes: not one of True, true, False, false
--clip=1 | --clip=1: not one of True, true, False, false
--clip_low=inf | --clip_low=inf: must be finite
--clip_low=-0.1 | --clip_low=-0.1 --clip_high=0.28: must not be negative
--clip_high=-1 | --clip_low=0.2 --clip_high=-1.0: must not be negative
--temperature=1e-3 | --temperature=0.001: must be at least 0.01
--temperature=inf | --temperature=inf: must be finite
--top_p=0 | --top_p=0.0: must be in (0, 1]; 1 keeps all tokens
--top_p=1.1 | --top_p=1.1: must be in (0, 1]; 1 keeps all tokens
--top_k=-2 | --top_k=-2: must be at least -1; 0 or -1 keeps all tokens
--top_k=257 | --top_k=257: larger than the vocabulary ... 256 tokens; 0 keeps all
--min_p=1 | --min_p=1.0: must be in [0, 1); 0 keeps all tokens
--lora_rnk=8 | --lora_rnk: no such flag; did you mean --lora_rank?
--critic_warmup=8 | --critic_warmup: no such flag; see --help
--nonsense.verl=8 | --nonsense.verl: no such flag; see --help
--objective=jackpt | --objective=jackpt: not one of none, grpo, reinforce, is, tis, ... did you mean jackpot?
--correction=tiss | --correction=tiss: not one of none, is, tis, tis_adjusted, icepop, ... did you mean tis?
--correction=jackpot | --correction=jackpot: a value of --objective, not of --correction; ... --objective=jackpot
--surrogate=grpo | --surrogate=grpo: a value of --objective, not of --surrogate; write --objective=grpo
--surrogate=pppo | --surrogate=pppo: not one of reinforce, ppo, gspo, tbpo, sapo, gmpo, ... cispo; did you mean ppo?
--advantage=grp | --advantage=grp: not one of grpo, grpo_no_std, rloo, maxrl; did you mean grpo?
--reduction=mean | --reduction=mean: not one of token-mean, seq-mean-token-mean, ... did you mean token-mean?
--optimizer=adam | --optimizer=adam: not one of adamw, muon; did you mean adamw?
--lr_schedule=cosin | --lr_schedule=cosin: not one of constant, linear, cosine; did you mean cosine?
--dtype=float8 | --dtype=float8: not one of float32, bfloat16, float16; did you mean float32?
--kv_cache_dtype=fp8 | --kv_cache_dtype=fp8: --rollout=hf has no such cache; use --rollout=vllm, or auto
--kv_cache_dtype=int8 --rollout=vllm | --kv_cache_dtype=int8: --rollout=vllm has no such ... use --rollout=hf, or auto
--kv_cache_dtype=int4 | --kv_cache_dtype=int4: not one of auto, fp8, int8; did you mean int8?
--rollout=sglang | --rollout=sglang: not one of vllm, hf
--rollout_dtype=fp8 | --rollout_dtype=fp8: not one of float32, bfloat16, float16
--rollout_quant=int4 | --rollout_quant=int4: not one of none, int8, fp8, w4a16, w3a16, w2a16; did you mean int8?
--parallel=tp | --parallel=tp: not one of ddp, fsdp
--keep_sampling_mask=replayed | --keep_sampling_mask=replayed: not one of off, recompute, ... did you mean replay?
--objective=is --reject=token,gee:0:1 | --reject=gee: not one of token, sequence, geo, ... did you mean geo?
--objective=is --reject=token,geo:1 | --reject=token,geo:1: geo:1 is not a statistic with two bounds; write geo:LOW:HIGH
--objective=is --reject=token,geo:a:b | --reject=token,geo:a:b: geo:a:b is not a statistic ... such as geo:0.9:1.1
--objective=is --reject=geo:2:1 | --reject=geo:2:1: the bounds of geo:2:1 are crossed; the first must be below
--objective=is --reject=geo:0:1,token --rs_high=2 | --rs_low=None --rs_high=2.0: ... each statistic has separate bounds
--objective=jackpot --ref_from=loglinear | --ref_from=loglinear: an actor, OBRS, ... need p_ref itself; use pass
--objective=tis --ref_from=loglinear --actor=base:actor | --ref_from=loglinear: an actor, ... use pass
--objective=tis --ref_from=loglinear --actor=none --normalize_weights=True | --normalize_w ... --ref_from=loglinear
--objective=tis --correction_target=new | --correction_target=new: weights p_new / p_inf replace ... not ref
--objective=jackpot --correction_target=new | --correction_target=new: ... has a separate target; use --obrs_target
--objective=opsm --loss_denominator=kept | --loss_denominator=kept: ... --correction_target=new is computed
--objective=vespo --normalize_weights | --normalize_weights needs all ... --correction_target=new is computed during it
--objective=tis_adjusted --normalize_weights | --normalize_weights ... --correction=tis_adjusted is computed during it
--obrs_lambda=0 | --obrs_lambda=0.0: lambda must be above 0 (1 is the usual value)
--obrs_lambda=-1 | --obrs_lambda=-1.0: lambda must be above 0 (1 is the usual value)
--obrs_lambda=inf | --obrs_lambda=inf: must be finite
--obrs_c1=0 | --obrs_c1=0.0: must be above 0
--obrs_c2=0.5 | --obrs_c2=0.5: caps p_ref / p_tgt, so it must be at least 1
--obrs_topk=257 | --obrs_topk=257: K must be between 1 and the vocabulary of 256 tokens
--obrs_accept_rate=1.5 | --obrs_accept_rate=1.5: must be in (0, 1]; leave it out to use --obrs_lambda
--obrs_accept_rate=0 | --obrs_accept_rate=0.0: must be in (0, 1]; leave it out to use --obrs_lambda
--model=base:policy@1.5 | --model=base:policy@1.5: the accuracy after @ must be a share between 0 and 1
--actor=base:actor@x | --actor=base:actor@x: the accuracy after @ must be a share
--weight_decay=-1 | --weight_decay=-1.0: must not be negative
--kernels=liger | --kernels=liger: its kernels run on a GPU; use --kernels=plain
--kernels=compile --rollout=vllm | --kernels=compile: vLLM's CPU engine switches torch.compile off in this process
--kernels=compile --rollout=hf --exact | --kernels=compile: --exact and --router_replay also replace these modules
--kernels=compile --rollout_quant=int8 --learner_quant=int8 | --kernels=compile: the low-bit layers
--grad_clip=0 | --grad_clip=0.0: must be above 0
--warmup_steps=-3 | --warmup_steps=-3.0: must not be negative
--warmup_steps=2.5 | --warmup_steps=2.5: a whole number of updates, or a share of --steps below 1
--save_every=-1 | --save_every=-1: must not be negative
--keep=0 | --keep=0: must be at least 1
--micro_tokens=0 | --micro_tokens=0: must be at least 1
--max_tokens=0 | --max_tokens=0: must be at least 1
--max_tokens=2000 | --max_tokens=2000: with prompts of up to 12 tokens it exceeds the model's context of 512
--distill_lambda=-1 | --distill_lambda=-1.0: must not be negative
--distill_lambda=inf | --distill_lambda=inf: must be finite
--distill_kl_target=-0.1 | --distill_kl_target=-0.1: must not be negative
--log_ratio_clamp=0 | --log_ratio_clamp=0.0: must be above 0
--obrs_lambda=1.4 --obrs_accept_rate=0.9 | --obrs_lambda=1.4: --obrs_accept_rate=0.9 ... leave out one of the two flags
--distill_lambda=200 --distill_kl_target=0.1 | --distill_lambda=200.0: --distill_kl_target starts from it
--objective=icepop --normalize_weights --loss_denominator=kept | --loss_denominator=kept: --normalize_weights already
--is_cap=nan | --is_cap=nan: must be a number
--tbpo_neg_high=0 | --tbpo_neg_high=0.0: the band's edges are 1 - clip_low and 1 + this; it must be above 0
--cppo_beta=-1 | --cppo_beta=-1.0 --gepo_defence=0.0: must not be negative; 0 is off
--kl_coef=-1 | --kl_coef=-1.0: must not be negative; 0 is off
--kl_estimator=k4 | --kl_estimator=k4: not one of k2, k3
--actor=none --kl_coef=1 --top_p=0.9 --keep_sampling_mask=recompute | --keep_sampling_mask=recompute with --kl_coef:
--entropy_coef=-1 | --entropy_coef=-1.0: must not be negative; 0 is off
--gepo_defence=0.5 | --gepo_defence=0.5: mixes into the group's expectation; it needs --ratio_base=group
--give_up=nan | --give_up=nan: must be a number
--give_up=0 | --give_up=0.0: must be above 0
--lora_rank=-1 | --lora_rank=-1: must not be negative; 0 is off
--lora_rank=2.5 | --lora_rank=2.5: must be a whole number
--lora_rank=4 --optimizer=muon | --lora_rank=4: --optimizer=muon orthogonalises whole matrices, ... use adamw
--lora_rank=4 --learner_quant=int8 | --lora_rank=4: --learner_quant=int8 computes on low-bit ... leave one of the two
--quant_group=0 | --quant_group=0: must be at least 1
--rollout_memory=-2 | --rollout_memory=-2.0: must not be negative
--rollout=vllm --rollout_memory=1e6 | --rollout_memory=1000000.0: ... a number of GiB, ... lower it
--arith=min_ops=6 | --arith: min_ops=6: must be between 1 and max_ops=5
--arith=explain=-1 | --arith=explain=-1: explain=-1: must be a whole number, 0 or more
--arith=total=500,operand=40 | --arith: total=500: must be below 200 and no less than operand=40
--out= | --out is empty: name the folder of this run, such as --out=out/run
--dual_clip=0.5 | --dual_clip=0.5: needs a value above 1 (3 is usual), --clip=True and --surrogate=ppo or gspo
stray | stray: flags are written --key=value
--steps=3 4 | 4: flags are written --key=value
-steps=3 | -steps=3: flags are written --key=value
-o out/x | -o: flags are written --key=value
-- | --: no such flag; see --help
--resume=maybe | --resume=maybe: not one of True, true, False, false
--config | --config: a value is missing; write --config=VALUE
--reject | --reject: a value is missing; write --reject=VALUE
        """,
    ),
    # train.py: flags that contradict each other
    *rows(
        "train.py --rollout=hf",
        r"""
--objective=tis --is_cap=0 | --is_cap=0.0: a cap of weights; must be at least 0.01
--objective=tis --is_cap=1e-3 | --is_cap=0.001: a cap of weights; must be at least 0.01
--lr=1.5 | --lr=1.5: must be at most 1; 1e-6 is usual
--lr=1e30 | --lr=1e+30: must be 0, or between 1e-12 and 1e12
--objective=jackpot --is_cap=3 | --is_cap=3.0: --correction=obrs has no cap C; use --obrs_c1
--objective=icepop --is_cap=3 | --is_cap=3.0: --correction=icepop has no cap C; use --rs_low and --rs_high
--objective=grpo --is_cap=3 | --is_cap=3.0: --correction=none has no cap C; leave it out
--objective=tis --is_cap=aut | --is_cap=aut: must be a number
--objective=tbpo --is_cap=1 | --is_cap=1.0: tbpo_mismatch caps two-sided to [1/C, C], so C must be above 1
--dual_clip=3 --clip=False | --dual_clip=3.0: needs a value above 1 (3 is ... ue and --surrogate=ppo or gspo
--dual_clip=3 --surrogate=sapo | --dual_clip=3.0: needs a value above 1 (3 is ... ue and --surrogate=ppo or gspo
--objective=reinforce --ratio_base=inf | --ratio_base=inf: --surrogate=reinforce has no ratio; use --surrogate=ppo
--kappa=exact | --kappa=exact is for --obrs_target=new; with target ref kappa always comes from the ref pass
--objective=z_tis --obrs_target=new | --correction=z_tis is a control for target ref; leave --obrs_target=ref
--distill_kl_target=0.1 --distill_lambda=0 | --distill_lambda=0.0: --distill_kl_target starts from it
--distill_kl_target=0.1 --actor=none | --distill_kl_target: there is no actor to distil; name one with --actor
--train_batch=100 | --train_batch=100: not divisible by --group_size=8 times 1 ... each rank trains on whole groups
--rollout_batch=300 | --rollout_batch=300: not a multiple of --train_batch=256
WORLD_SIZE=3 --train_batch=64 --rollout_batch=64 | --train_batch=64: not ... each rank trains on whole groups
--group_size=1 --train_batch=4 --rollout_batch=4 | --group_size=1: ... needs at least 2 responses to each prompt
--logprobs_mode=raw --top_k=5 | --logprobs_mode=raw: raw ... use processed, or --keep_sampling_mask=off
--keep_sampling_mask=recompute --top_k=5 | --keep_sampling_mask=recompute with an --actor: the KL ... use replay
--exact --dtype=bfloat16 | --exact: --rollout_dtype=float32 and --dtype=bfloat16 ... the same, float32 or bfloat16
--exact --rollout_quant=int8 | --exact: --rollout_quant=int8 and --learner_quant=none ... align the learner with
--exact --rollout=vllm | --exact: vLLM and remote samplers compute their sums ... use --rollout=hf
--learner_quant=aligned | --learner_quant=aligned: the rollouts are ... name a --rollout_quant, or name the learner's
--objective=icepop --reject=geo | --reject=geo: --correction=icepop ... --reject=geo:LOW:HIGH, or use --reject=none
--objective=tis --rs_high=2 | --rs_low=None --rs_high=2.0: no statistic ... name a statistic with --reject=token,
--objective=tis --reject=geo --rs_low=1.2 | --rs_low=1.2 --rs_high=1.1: the bounds ... rs_low must be below rs_high
--rs_low=3 --rs_high=2 | --rs_low=3.0 --rs_high=2.0: the bounds are crossed; rs_low must be below rs_high
--objective=tis --is_floor=2 | --is_floor=2.0: a lower bound of a capped weight, below ... --correction=tis has one
--objective=grpo --reject_of=negative | --reject_of=negative: nothing is rejected; add --reject=token, sequence, geo
--objective=grpo --reject=token --reject_of=positive | --reject_of=positive: ... all, negative
--objective=grpo --is_floor=0.5 | --is_floor=0.5: a lower bound of a capped weight, ... --correction=none has none
--objective=ppo_is --correction=tis | --ratio_base=inf already corrects for the mismatch: use --correction=none
--objective=grpo --ratio_base=group | --ratio_base=group divides the ... urrogate=gspo or tbpo, not ppo
--correction=tis_adjusted | --correction=tis_adjusted already contains p_new / p_inf ... eeds --ratio_base=new, not ref
--correction=jackpot_adjusted --ratio_base=new | --correction=jackpot_adjusted: its ... use --obrs_target=new
--obrs_z=exact --actor=none | --obrs_z=exact: p_inf over the whole vocabulary is known only with an ... use bracket
--obrs_z=exact --delay=constant | --obrs_z=exact: p_inf over the whole vocabulary is known only with an ... use bracket
--loss_denominator=kept --obrs_target=new | --loss_denominator=kept with ... the update: add --kappa=exact
--objective=tis_adjusted --loss_denominator=kept --reject=seq_min | --loss_denominator=kept: needs the keep-mask before
--obrs_accept_rate=0.9 --obrs_target=new | --obrs_accept_rate with ... the update: add --kappa=exact
--delay=lognormal --delay_min=50 --delay_max=20 | --delay_min=50.0 ... ve 0 and not above the longest
--delay=weibull --delay_min=20 --delay_max=20 | --delay=weibull: two quantiles need ... use --delay=constant
--delay=constant --delay_samplers=0 | --delay_samplers=0: must be at least 1
--delay=constant --step_seconds=0 | --step_seconds=0.0: must be above 0
--delay=constant --window_seconds=0 | --window_seconds=0.0: must be above 0
--delay=constant --max_staleness=-1 | --max_staleness=-1: a number of updates, 0 or more; leave it out for no bound
--delay=constant --max_staleness=2 --sync_every=8 | --max_staleness=2: with --sync_every=8 ... broadcast more often
--delay=weibull --sampler_rate=2 | --sampler_rate=2.0: samplers ... bound their age with --max_staleness or
--delay=constant --sampler_rate=0.5 --window_seconds=0.9 --step_seconds=1 | --window_seconds=0.9: at ... dropped before
--delay=constant --samplers=x | --delay=constant simulates samplers ... give --delay to each
--max_staleness=8 | --max_staleness=8 --sync_every=1: there are no ... name a distribution with --delay, or a
--rollout=vllm --router_replay | --router_replay: on a CPU vLLM does not report its expert choices; use --rollout=hf
--samplers=files | --samplers=files: write tcp://HOST:PORT, or name a shared folder
--samplers= | --samplers is empty: write local, tcp://HOST:PORT or a folder
--samplers=http://127.0.0.1:5555 | --samplers=http://127.0.0.1:5555: not an address; write tcp://HOST:PORT
--samplers=tcp://*:5555 | --samplers=tcp://*:5555: samplers on other hosts need --keys ... listen on tcp://127.0.0.1:
--task=fine.jsonl | --model=base:policy knows only --task=arith; give a model's folder for fine.jsonl
--actor=base:policy --model=POLICY --task=fine.jsonl | --actor=base:policy knows only ... give a model
--model=POLICY --task=fine.jsonl --max_tokens=8 --lr=1 --dtype=float32 --arith=seed=5 | --arith=seed=5: settings of
--resume --overwrite --out=run | --resume with --overwrite: --resume continues the run, --overwrite deletes it; leave
        """,
    ),
    # train.py: missing packages, models and files
    *rows(
        "train.py --rollout=hf",
        r"""
WITHOUT=vllm --rollout=vllm | --rollout=vllm: vLLM is not installed here; ... install it (make demo does), or
WITHOUT=wandb --wandb=x | --wandb=x: wandb is not installed; pip install wandb, or leave the flag out
WITHOUT=math_verify --model=POLICY --task=fine.jsonl --max_tokens=8 --lr=1 --dtype=float32 | --reward=math, for ... pip
--model=/no/such | --model=/no/such: no Hugging Face ... give a folder as save_pretrained writes it, or base:policy
--model=POLICY --actor=ACTOR --max_tokens=9 | --model=POLICY: these ... --task=hf: ... --lr=1e-06 --actor_lr=1e-06
--model=POLICY --lr=1e-5 | --model=POLICY: ... --task=hf:openai/gsm8k@main/train --max_tokens=4096 --dtype=bfloat16
--model= | --model=: no Hugging Face model folder (no ... give a folder as save_pretrained writes it, or base:policy
--model=none | --model=none: no Hugging Face model folder ... give a folder as save_pretrained writes it, or base:policy
HF_HUB_OFFLINE=1 --model=Qwen/Qwen3-0.6B --task=arith --lr=1 --dtype=float32 --max_tokens=8 | --model=Qwen ... no such
--model=base:polcy | --model=base:polcy: not one of base:policy, base:actor; did you mean base:policy?
--actor=/no/such | --actor=/no/such: no Hugging Face ... give a folder as save_pretrained writes it, or base:policy
--actor=base: | --actor=base:: not one of base:policy, base:actor; did you mean base:actor?
--config=/no/such.toml | --config=/no/such.toml: no such file; name a TOML file of flags, such as configs/demo.toml
--config= | --config=: no such file; name a TOML file of flags, such as configs/demo.toml
--config=. | --config=.: no such file; name a TOML file of flags, such as configs/demo.toml
        """,
    ),
    # train.py: configurations
    *rows(
        "train.py --rollout=hf",
        r"""
--config=cut.toml | --config=cut.toml: not valid TOML (Invalid value (at end of document)); fix that line
--config=two_lines.toml | --config=two_lines.toml: not valid TOML (Expected '=' after a key in ... fix that line
--config=twice.toml | --config=twice.toml: not valid TOML (Cannot overwrite a value (at line 2, ... fix that line
--config=near.toml | near.toml: stps: no such flag; did you mean --steps?
--config=far.toml | far.toml: critic_warmup: no such flag; see --help
--config=section.toml | section.toml: RunFlags: no such flag; see --help
--config=include.toml | include.toml: config: no such flag; see --help
--config=bom.toml | bom.toml: stps: no such flag; did you mean --steps?
--config=utf16.toml | utf16.toml: not a text file in UTF-8 (byte 0); convert it
--config=zeros.toml | --config=zeros.toml: not valid TOML (Invalid statement (at line 1, column 1)); fix that line
--config=json.toml | --config=json.toml: not valid TOML (Invalid statement (at line 1, column 1)); fix that line
--config=yaml.toml | --config=yaml.toml: not valid TOML (Expected '=' after a key in a ... fix that line
--config=flags.toml | flags.toml: --lr: no such flag; see --help
--config=text_steps.toml | text_steps.toml: steps = 'x' is not of type int
--config=true_steps.toml | true_steps.toml: steps = True is not of type int
--config=float_steps.toml | float_steps.toml: steps = 1.5 is not of type int
--config=text_lr.toml | text_lr.toml: lr = 'x' is not of type float
--config=true_lr.toml | true_lr.toml: lr = True is not of type float
--config=list_lr.toml | list_lr.toml: lr = [0.001, 0.0001] is not of type float
--config=date_lr.toml | date_lr.toml: lr = datetime.date(2024, 1, 1) is not of type float
--config=inf_lr.toml | inf_lr.toml: lr=inf: must be finite
--config=nan_clip.toml | nan_clip.toml: grad_clip=nan: must be a number
--config=long_lr.toml | long_lr.toml: lr=9999999999999999999999999999999999999999: must have at most 18 digits
--config=long_steps.toml | long_steps.toml: steps=999999999999999999999999999999: must have at most 18 digits
--config=digits.toml | --config=digits.toml: not valid TOML (Exceeds the limit (4300 digits) ... fix that line
--config=text_cap.toml | text_cap.toml: is_cap = 'x' is not of type float
--config=one_clip.toml | one_clip.toml: clip = 1 is not of type bool
--config=number_correction.toml | number_correction.toml: correction = 1 is not of type str
--config=number_model.toml | number_model.toml: model = 3 is not of type str
--config=choice.toml | choice.toml: --rollout=hff: not one of vllm, hf; did you mean hf?
--config=list_choice.toml | list_choice.toml: --rollout=['vllm']: not one of vllm, hf; did you mean vllm?
--config=objective.toml | --objective=jackpt: not one of none, grpo, reinforce, is, tis, ... did you mean jackpot?
--config=bound.toml | --temperature=0.0: must be at least 0.01
--config=unreadable.toml | unreadable.toml: Permission denied; ... name a different path, or get permission
--config=/proc/self/mem | /proc/self/mem: Input/output error; check the disk, or name a path on a different disk
        """,
    ),
    # train.py: problems
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN}",
        r"""
--task= | --task=: a folder; give `arith` or the path of a JSONL, JSON or Parquet file
--task=. | --task=.: a folder; give `arith` or the path of a JSONL, JSON or Parquet file
--task=arthi | --task=arthi: no such file; give `arith` or the path of a JSONL, JSON or Parquet file
--task=https://host/x.jsonl | --task=https://host/x.jsonl: no such file; give `arith` or the path of a JSONL,
--task=empty.jsonl | empty.jsonl: no problems in the file; a row needs `problem` ... and `answer`
--task=blank.jsonl | blank.jsonl: no problems in the file; a row needs `problem` ... and `answer`
--task=cut.jsonl | cut.jsonl, line 2: not valid JSON (Unterminated ... fix or remove that line, one object a line
--task=list.jsonl | list.jsonl, line 2: not a JSON object; a row needs `problem` ... and `answer`
--task=array.jsonl | array.jsonl, line 1: not valid JSON (Expecting ... fix or remove that line, one object a line
--task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a number; add one
--task=no_problem.jsonl | no_problem.jsonl, line 3: no `problem` or `question` text; add one
--task=empty_problem.jsonl | empty_problem.jsonl, line 1: no `problem` or `question` text; add one
--task=number_problem.jsonl | number_problem.jsonl, line 1: no `problem` or `question` text; add one
--task=chat_problem.jsonl | chat_problem.jsonl, line 1: no `problem` or `question` text; add one
--task=other_keys.jsonl | other_keys.jsonl, line 1: no `answer` that is a text ... name the column with --columns
--task=capitals.jsonl | capitals.jsonl, line 1: no `problem` or `question` text; add one
--task=list_answer.jsonl | list_answer.jsonl, line 1: no `answer` that is a text or a number; add one
--task=null_answer.jsonl | null_answer.jsonl, line 1: no `answer` that is a text or a number; add one
--task=true_answer.jsonl | true_answer.jsonl, line 1: no `answer` that is a text or a number; add one
--task=nan_answer.jsonl | nan_answer.jsonl, line 1: the `answer` is nan, which no ... fix or remove that line
--task=infinite_answer.jsonl | infinite_answer.jsonl, line 1: the `answer` is -inf, ... fix or remove that line
--task=hashes_answer.jsonl | hashes_answer.jsonl, line 1: the `answer` is empty; add one, or remove that line
--task=surrogate.jsonl | surrogate.jsonl, line 1: a lone surrogate, ... fix or remove that line
--task=surrogate_answer.jsonl | surrogate_answer.jsonl, line 2: a lone ... fix or remove that line
--task=null.jsonl | null.jsonl, line 2: not a JSON object; a row needs `problem` ... and `answer`
--task=text.jsonl | text.jsonl, line 1: not a JSON object; a row needs `problem` ... and `answer`
--task=no_comma.jsonl | no_comma.jsonl, line 1: not valid JSON ... fix or remove that line, one object a line
--task=python_quotes.jsonl | python_quotes.jsonl, line 1: not valid ... fix or remove that line, one object a line
--task=brackets.jsonl | brackets.jsonl, line 1: not valid JSON ... fix or remove that line, one object a line
--task=digits.jsonl | digits.jsonl, line 1: not valid JSON (Exceeds ... fix or remove that line, one object a line
--task=long.jsonl | --max_tokens=8: the longest prompt has 1012 ... shorten the response, or drop long prompts
--task=table.csv | table.csv, line 1: not valid JSON (Expecting value); fix or remove that line, one object a line
--task=utf16.jsonl | utf16.jsonl: not a text file in UTF-8 (byte 0); convert it
--task=latin1.jsonl | latin1.jsonl: not a text file in UTF-8 (byte 54); convert it
--task=packed.jsonl.gz | packed.jsonl.gz: not a complete gzip file of text ... copy it again
--task=fine.jsonl.zst | --task=fine.jsonl.zst: no such file; ... or hf:NAME/SPLIT
--task=unreadable.jsonl | unreadable.jsonl: Permission denied; ... name a different path, or get permission
--task=/proc/self/mem | /proc/self/mem: Input/output error; check the disk, or name a path on a different disk
--eval_task=nowhere.jsonl | --eval_task=nowhere.jsonl: no such file; give the path of a JSONL, JSON or Parquet file
--eval_task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a number; add one
--eval_task=long.jsonl | --eval_task=long.jsonl: the longest prompt has 1012 ... shorten the response
HF_HUB_OFFLINE=1 --actor=some/where --actor_lr=1 | --actor=some/where: no such folder here, ... or give a folder
--task=hf:gsm8k | --task=hf:gsm8k: write hf:NAME/SPLIT, such as hf:openai/gsm8k@main/train
--task=fine.parquet | fine.parquet: not a complete Parquet file ... copy it again
--task=cut.json | cut.json, line 5: not valid JSON (Expecting ',' delimiter); fix this place in the array
--task=array.json | array.json: not a JSON array of rows; the name of a file with one row per line must end in .jsonl
--task=nosuch.py:Task | --task=nosuch.py:Task: nosuch.py: no such file; write FILE.py:CLASS
--task=own.py:Lost | --task=own.py:Lost: cannot be loaded (AttributeError ... fix the file
--task=own.py:Small | --task=own.py:Small: needs a method problem(split, index) and an attribute size
--task=own.py:Wide | --max_prompt_tokens: own.py:Wide is endless, so the length of its longest prompt is not known
--task=fine.jsonl --reward=mth | --reward=mth: not one of math, gsm8k, praxis, ... did you mean math?
--task=fine.jsonl --reward=math*x | --reward=math*x: x is not a weight; write NAME*0.5
--task=fine.jsonl --reward=nosuch.py:f | --reward=nosuch.py:f: nosuch.py: no such file; write FILE.py:FUNCTION
--task=fine.jsonl --reward=own.py:nosuch | --reward=own.py:nosuch: cannot be loaded (AttributeError ... fix the file
--task=fine.jsonl --reward=own.py:raises | --reward=own.py:raises: on the first problem ... ZeroDivisionError: ... line
--task=fine.jsonl --reward=own.py:text | --reward=own.py:text: on the first problem ... neither a finite number nor a
--task=fine.jsonl --columns=prompt=nosuch | fine.jsonl, line 1: no `nosuch` text; add one
--task=fine.jsonl --columns=answer=nosuch | fine.jsonl, line 1: no `nosuch` that is a text or a number; add one
--task=fine.jsonl --columns=problem | --columns=problem: write KIND=NAME, separated by commas; each KIND is one
--task=fine.jsonl --prompt_template=Q | --prompt_template=Q: must contain {problem} exactly once, or be one of
--task=fine.jsonl --chat_template=nosuch | --chat_template=nosuch: no such file; give auto, off, or a file of Jinja
--task=fine.jsonl --chat_kwargs=x | --chat_kwargs=x: write NAME=VALUE, separated by commas, such as
--task=fine.jsonl --max_prompt_tokens=1 | --max_prompt_tokens=1: every prompt of fine.jsonl is longer; the shortest
--task=fine.jsonl --max_prompt_tokens=-1 | --max_prompt_tokens=-1: must be at least 0
--task=fine.jsonl --overlong=9 | --overlong=9: must be at least 0, and below --max_tokens
--eval_task=fine.jsonl:n=4 | --eval_task=fine.jsonl:n=4: no such setting; the settings are samples=
--eval_task=fine.jsonl:samples=0 | --eval_task=fine.jsonl:samples=0: must be a number of at least 1
--eval_task=fine.jsonl,fine.jsonl | --eval_task=fine.jsonl,fine.jsonl: two sets have the same name; rename a file
--task=fine.jsonl --eval_every=5 | --eval_every=5: there is no held-out set; name files or data sets with --eval_task
--reward=math | --reward=math: --task=arith does not use this flag; leave it out, or name a file with --task
--epochs=2 | --epochs=2.0: arith is endless; give --steps
--epochs=2 --steps=5 | --epochs with --steps: both set the length of the run; leave out one of the two flags
--epochs=2 --dynamic_sampling=3 | --epochs with --dynamic_sampling: the number of groups per update is not known; give
--dynamic_sampling=-1 | --dynamic_sampling=-1: must not be negative
--stop=nosuch | --stop=nosuch: not one token of the ... give tokens, such as <|im_end|>, separated by commas
--top_k=300 | --top_k=300: larger than the vocabulary ... 256 tokens; 0 keeps all
--max_tokens=500 | --max_tokens=500: the longest prompt has 12 ... shorten the response, or drop long prompts
--rollout_quant=w4a16 --quant_group=7 | --quant_group=7: model.layers.0.self_attn.q_proj has ... choose a divisor
--learner_quant=w3a16 --quant_group=48 | --quant_group=48: model.layers.0.self_attn.q_proj has ... choose a divisor
        """,
    ),
    # train.py: model folders
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN}",
        r"""
--model=no_config | --model=no_config: no Hugging Face model folder ... give a folder as save_pretrained writes it, or
--model=only_config | only_config: its tokenizer ... copy tokenizer.json and tokenizer_config.json of this model
--model=config_cut | config_cut/config.json: not valid JSON (Unterminated ... give a complete folder of a causal
--model=config_list | config_list/config.json: not a JSON object; ... give a complete folder of a causal
--model=config_number | config_number/config.json: not a JSON object; ... give a complete folder of a
--model=config_empty | config_empty/config.json: not valid JSON (Expecting value: line ... give a complete folder of a
--model=config_utf16 | config_utf16/config.json: not a text file in UTF-8 (byte 0); convert it
--model=config_untyped | config_untyped: its config.json cannot be read (Unrecognized ... give a complete folder of a
--model=new_type | new_type: its config.json cannot be read (The checkpoint you ... give a complete folder of a causal
--model=text_vocabulary | text_vocabulary: its config.json cannot be read (Validation ... give a complete folder of a
--model=negative_vocabulary | negative_vocabulary: its config.json gives no vocab_size ... give a complete folder of a
--actor=small_vocabulary --actor_lr=1 | small_vocabulary: its tokenizer has ... a vocab_size of 100; give the model the
--model=text_context | text_context: its config.json cannot be read (Validation error ... give a complete folder of a
--model=short_context | --max_tokens=8: the longest prompt has 12 ... shorten the response, or drop long prompts
--model=text_width | text_width: its config.json cannot be read (Validation ... give a complete folder of a causal
--model=layers_of_two_numbers | layers_of_two_numbers: its config.json cannot be read ... give a complete folder of a
--model=new_dtype | new_dtype: its config.json cannot be read (module 'torch' ... give a complete folder of a causal
--model=no_tokenizer | no_tokenizer: its tokenizer has no ... copy tokenizer.json and tokenizer_config.json of this
--model=tokenizer_cut | tokenizer_cut: its tokenizer ... copy tokenizer.json and tokenizer_config.json of this
--model=tokenizer_utf16 | tokenizer_utf16: its tokenizer ... copy tokenizer.json and tokenizer_config.json of this
--model=tokenizer_empty | tokenizer_empty: its tokenizer ... copy tokenizer.json and tokenizer_config.json of this
--model=tokenizer_config_cut | tokenizer_config_cut: its ... copy tokenizer.json and tokenizer_config.json of this
--actor=other_words --actor_lr=1 | --actor=other_words: its ... actor and policy must share one vocabulary
--model=ends_cut | ends_cut/generation_config.json: not valid JSON (Expecting property ... fix or remove it
--model=ends_text | ends_text/generation_config.json: its eos_token_id lists ['</s>'], which is no ... fix it
--model=ends_list | ends_list/generation_config.json: not a JSON object; fix or remove it
--model=no_weights | no_weights: no weights there (model.safetensors is ... copy the folder again, or delete it
--model=weights_empty | weights_empty/model.safetensors: its weights cannot be ... copy the folder again, or delete
--model=weights_cut | weights_cut/model.safetensors: its weights cannot be ... copy the folder again, or delete it
--model=weights_html | weights_html/model.safetensors: its weights cannot be ... copy the folder again, or delete
--model=weights_pointer | weights_pointer/model.safetensors: its weights cannot ... copy the folder again, or delete
--model=weights_unreadable | weights_unreadable/model.safetensors: its weights ... copy the folder again, or delete
--model=index_cut | index_cut/model.safetensors.index.json: not valid JSON ... copy the folder again, or delete it
--model=index_empty | index_empty/model.safetensors.index.json: lists no ... copy the folder again, or delete it
--model=shard_missing | shard_missing: model.safetensors, and an index ... delete the older of the two
--actor=no_weights --actor_lr=1 | no_weights: no weights there ... copy the folder again, or delete it
LOADS=1 --model=wider | wider: its weights do not fit its config.json ... give a complete checkpoint of that shape
LOADS=1 --model=deeper | deeper: its weights do not fit its config.json ... give a complete checkpoint of that shape
--model=t5_type | t5_type: its config.json cannot be read ... give a complete checkpoint of a causal language model
--model=new_activation | new_activation: its config.json cannot be ... give a complete checkpoint of a causal language
--model=gptq | gptq: its weights are already quantized, and a learner cannot train the codes; give the model in 16
        """,
    ),
    # train.py: run folders
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN}",
        r"""
--out=file | --out=file: a file, not a folder; name a folder
--out=file/run | --out=file/run: cannot be written (Not a directory); name a different folder
--out=read_only/run | --out=read_only/run: cannot be written (Permission denied); name a different folder
--out=read_only | --out=read_only: cannot be written (Permission denied); name a different folder
--out=locked | --out=locked: another process uses this folder; wait until it ends, or name a different folder
--out=/proc/run | --out=/proc/run: cannot be written (No such file or directory); name a different folder
--out=run | --out=run already holds a run: add ... --overwrite to delete it, or name a different folder
--out=run_of_a_model | --out=run_of_a_model: its config.json is not from a run; name a different folder
--out=run_of_a_model --overwrite | --out=run_of_a_model: its config.json is not from a run; name a different folder
--out=config_damaged | --out=config_damaged: its config.json is not from a run; name a different folder
--out=config_damaged --overwrite | --out=config_damaged: its config.json is not from a run; name a different folder
--out=notes --overwrite | --overwrite: --out=notes holds files but no run; name a different folder
--out=. --overwrite | --overwrite: --out=. holds the working folder; name the folder of one run
--out=.. --overwrite | --overwrite: --out=.. holds the working folder; name the folder of one run
--out=run --overwrite --task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a ... add one
--out=run --overwrite --model=no_weights | no_weights: no weights there ... copy the folder again, or
        """,
    ),
    *rows(
        "train.py --resume",
        r"""
--out=/no/such/run | --resume: /no/such/run holds no run; start without --resume, or name its folder with --out
--out=file | --resume: file holds no run; start without --resume, or name its folder with --out
--out=notes | --resume: notes holds no run; start without --resume, or name its folder with --out
--out=run --lr=0.5 | --resume with a changed configuration: ... or start a new run in a different --out
--out=run --objective=tis | --resume with a changed configuration: --objective was ... give the old value, or start
--out=run_cut | run_cut/config.json: not valid JSON ... copy it from a backup, or start
--out=run_of_lists | run_of_lists/config.json: not a JSON object; ... copy it from a backup, or start
--out=run_without_flags | --resume: run_without_flags/config.json holds no flags of a ... copy it from a backup, or
--out=run_of_a_model | --resume: run_of_a_model/config.json holds no flags of a run; ... copy it from a backup, or
--out=run_of_text | run_of_text/config.json: steps = 'many' is not of type int
--out=run_of_old_choices | run_of_old_choices/config.json: --rollout=sglang: not one of vllm, hf
--out=run_in_utf16 | run_in_utf16/config.json: not a text file in UTF-8 (byte 0); convert it
--out=run_spoilt | run_spoilt: all checkpoints are damaged; ... start a new run with --overwrite, or in a different
        """,
    ),
    # train.py: samplers on other machines
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN} --samplers=tcp://127.0.0.1:5555",
        r"""
--keys=/no/such | --keys=/no/such: 0 secret keys there instead ... `python -m remote.keys OUT --samplers=N` makes a
--keys=file | --keys=file: 0 secret keys there instead of one; ... `python -m remote.keys OUT --samplers=N` makes a
--keys=keys_open | --keys=keys_open: learner.key_secret can be read by other users; ... chmod 600 it, or make new keys
--keys=keys_two | --keys=keys_two: 2 secret keys there instead ... `python -m remote.keys OUT --samplers=N` makes a
--keys=keys_cut | --keys: keys_cut/learner.key_secret is not a file of keys; copy it again, or make new keys
--keys=keys_nobody | --keys=keys_nobody: no sampler's public key in its folder ... check that this is the
--keys=keys_sampler | --keys=keys_sampler: no sampler's public key in its folder ... check that this is the
        """,
    ),
    *rows(
        f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN}",
        r"""
--samplers=tcp://127.0.0.1:99999 | --samplers=tcp://127.0.0.1:99999: a port is a number from 0 to 65535
--samplers=tcp://127.0.0.1:x | --samplers=tcp://127.0.0.1:x: no port; write tcp://HOST:PORT
--samplers=tcp://127.0.0.1: | --samplers=tcp://127.0.0.1:: no port; write tcp://HOST:PORT
--keys=keys_learner --samplers=tcp://203.0.113.1:5555 | --samplers=tcp://203.0.113.1:5555: Cannot ... name a free
--keys=keys_learner --samplers=tcp://:5555 | --samplers=tcp://:5555: no host; write tcp://HOST:PORT
--samplers=ipc:///no/such/socket | --samplers=ipc:///no/such/socket: No such file or ... name a free address of this
--samplers=ipc:// | --samplers=ipc://: not an address; write tcp://HOST:PORT
--samplers=file | file/models: Not a directory; name a different path
--samplers=read_only/shared | read_only/shared: Permission denied; ... name a different path, or get
        """,
    ),
    # machinery/warmstart.py, mini.py, metrics.py, objectives.py
    *rows(
        "-m machinery.warmstart",
        r"""
--rollout=hf --model=POLICY --task=arith --max_tokens=8 --lr=1 --dtype=float32 | --model=POLICY: ... leave --model out
--rollout=hf --task=fine.jsonl | --model=base:policy knows only ... give a model's folder for fine.jsonl
--size=3 | --size: no such flag; see --help
policy | policy: flags are written --key=value
        """,
    ),
    *rows(
        "mini.py",
        r"""
--stps=3 | --stps=3: write --name=value, with a name from the settings in mini.py
out/mini | out/mini: write --name=value, with a name from the settings in mini.py
--steps | --steps: write --name=value, with a name from the settings in mini.py
        """,
    ),
    *rows(
        "metrics.py",
        r"""
out/demo | out/demo: metrics.py explains all names and takes none; python -m machinery.plot RUN draws a run's
        """,
    ),
    *rows(
        "objectives.py",
        r"""
tis | tis: python objectives.py takes no arguments
        """,
    ),
    # eval.py
    *rows(
        "eval.py",
        r"""
| --model is empty: name a run folder, a checkpoint or a Hugging Face folder
--model= | --model is empty: name a run folder, a checkpoint or a Hugging Face folder
--model=file | --model=file: no model there; give a run folder, a checkpoint or a Hugging Face folder
--model=/no/such | --model=/no/such: no model there; give a run folder, a checkpoint or a Hugging Face folder
--model=base:polcy | --model=base:polcy: not one of base:policy, base:actor; did you mean base:policy?
--model=notes --rollout=hf | --model=notes: no model there; give a run folder, a checkpoint or a Hugging Face folder
--model=no_config --rollout=hf | --model=no_config: no model there; ... give a run folder, a checkpoint
--model=run_spoilt --rollout=hf | run_spoilt: all checkpoints are damaged; ... start a new run with --overwrite, or in
--model=only_config --rollout=hf --max_tokens=8 | only_config: its ... copy tokenizer.json
--model=config_cut --rollout=hf | config_cut/config.json: not valid JSON ... copy it again, or name a different folder
--model=config_number --rollout=hf | config_number/config.json: not a JSON ... copy it again, or name a different folder
--model=config_utf16 --rollout=hf | config_utf16/config.json: not a text file in UTF-8 (byte 0); convert it
--model=config_untyped --rollout=hf --max_tokens=8 | --model=config_untyped: no model there; ... give a run folder, a
--model=new_type --rollout=hf --max_tokens=8 | new_type: its config.json cannot be read (The ... give a complete
--model=text_context --rollout=hf --max_tokens=8 | text_context: its config.json cannot be read ... give a complete
--model=no_tokenizer --rollout=hf --max_tokens=8 | no_tokenizer: its ... copy tokenizer.json
--model=tokenizer_cut --rollout=hf --max_tokens=8 | tokenizer_cut: its ... copy tokenizer.json
--model=no_weights --rollout=hf --max_tokens=8 | no_weights: no weights there ... copy the folder again, or delete
--model=weights_html --rollout=hf --max_tokens=8 | weights_html/model.safetensors: its weights ... copy the folder
LOADS=1 --model=wider --rollout=hf --max_tokens=8 | wider: its weights do not fit its ... give a complete
--model=base:policy --rollout=hf --task=fine.jsonl | --model=base:policy knows only ... give the folder of
--model=base:policy --rollout=hf --max_tokens=900 | --max_tokens=900: with ... exceeds the model's context of 512
--grade_gold=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a number; add one
--grade_gold=fine.jsonl --task=fine.jsonl | --task=fine.jsonl: --grade_gold already names the file; leave out one
--model=POLICY --rollout=hf | --model=POLICY: these flags have no default for a custom model; ... --max_tokens=4096
--grade_gold=fine.jsonl --model=POLICY | --grade_gold grades a file's gold answers ... leave --model out
--grade_gold=/no/such.jsonl | --grade_gold=/no/such.jsonl: no such file; give the path of a JSONL, JSON or
--grade_gold=. | --grade_gold=.: a folder; give the path of a JSONL, JSON or Parquet file
WITHOUT=math_verify --grade_gold=fine.jsonl | --reward=math, for fine.jsonl: math-verify is not installed; pip
WITHOUT=vllm --model=POLICY --max_tokens=8 | --rollout=vllm: vLLM is not installed here; ... install it (make
        """,
    ),
    *rows(
        "worth.py --rollout=hf --model=POLICY --actor=none --task=arith --max_tokens=8 --rollout_dtype=float32",
        r"""
--objective=tis | --objective: name the objectives to measure with --rows
--correction=tis | --correction: name the objectives to measure with --rows
--rows= | --rows: no objective is named
--rows=tsi | --objective=tsi: not one of ... did you mean tis?
--rows='tis is_kap=3' | --is_kap: no such flag; did you mean --is_cap?
--rows='tis; jackpot is_cap=3' | --is_cap=3.0: --correction=obrs has no cap C; use --obrs_c1
--rows='jackpot obrs_target=new' | --rows: jackpot obrs_target=new needs ... unknown here
--rows='jackpot obrs_topk=5; z_tis obrs_topk=6' | --rows: the rows have different --obrs_topk; measure ... separate runs
--batches=1 | --batches=1: must be at least 3, for an error estimate
--noise_batches=25 | --noise_batches=25: must be between 1 and --batches=24
--noise_batches=1 --group_size=128 | --noise_batches=1: 2 groups of responses; an error estimate needs at least 4
--reference=5 | --reference=5: must be a multiple of 4 above 0, for an error estimate
--directions=0 | --directions=0: must be a multiple of 4 above 0, for an error estimate
--share=0 | --share=0.0: a share of the parameters; must be above 0 and at most 1
--lengths=9,9 | --lengths=9,9: must be rising lengths above 0, such as 16,64
--lengths=long | --lengths=long: must be rising lengths above 0, such as 16,64
--delay=lognormal | --delay: set stale sampler weights with --stale here
--rollout_quant=int8 --learner_quant=aligned | --learner_quant=aligned: the gradient ... use none
--stale=/no/such | --stale=/no/such: no Hugging Face ... give the `policy` of a checkpoint
--stale=small_vocabulary | small_vocabulary: its tokenizer has 256 ... a vocab_size of 100; give the model the
--stale=no_weights | no_weights: no weights there ... copy the folder again, or delete
--json=. | --json=.: a folder; name a file in this folder
--json=/dev/null/x.json | --json=/dev/null/x.json: /dev/null is a file, not a folder; name a different path
--btaches=3 | --btaches: no such flag; did you mean --batches?
        """,
    ),
    *rows(
        "eval.py --rollout=hf --model=POLICY --max_tokens=8",
        r"""
--k= | --k=: each k must be between 1 and --samples=4, as in 1,4
--k=x | --k=x: each k must be between 1 and --samples=4, as in 1,4
--k=1,,4 | --k=1,,4: each k must be between 1 and --samples=4, as in 1,4
--k=1.5 | --k=1.5: each k must be between 1 and --samples=4, as in 1,4
--k=0 | --k=0: each k must be between 1 and --samples=4, as in 1,4
--k=1,9 | --k=1,9: each k must be between 1 and --samples=4, as in 1,4
--k=1;2 | --k=1;2: each k must be between 1 and --samples=4, as in 1,4
--samples=0 | --samples=0: must be at least 1
--problems=0 | --problems=0: must be at least 1
--problems=many | --problems=many: must be a whole number
--max_tokens=0 | --max_tokens=0: must be at least 1
--max_tokens=1000 | --max_tokens=1000: the longest prompt of arith has 12 ... shorten the response, or drop long prompts
--role=actr | --role=actr: not one of policy, actor; did you mean actor?
--role=actor | --role=actor: ... is a single model, not a run or a checkpoint; leave the flag out
--actor=ACTOR | --actor: no such flag
--router_replay | --router_replay=True: an evaluation has no learner; use python -m probe
--learner_quant=int8 | --learner_quant=int8: an evaluation has no learner; use python -m probe
--exact | --exact=True: an evaluation has no learner; use python -m probe
--rollout_quant=w4a16 --quant_group=7 | --quant_group=7: model.layers.0.self_attn.q_proj has ... choose a divisor
--quant_group=0 | --quant_group=0: must be at least 1
--rollout_memory=-1 | --rollout_memory=-1.0: must not be negative
--out=. | --out=.: a folder; name a file in this folder
--out=file/x.json | --out=file/x.json: ... is a file, not a folder; name a different path
--out=read_only/x.json | --out=read_only/x.json: ... cannot be written; name a different path
--out=/proc/x.json | --out=/proc/x.json: /proc cannot be written; name a different path
--temperature=1e-3 | --temperature=0.001: must be at least 0.01
--top_p=2 | --top_p=2.0: must be in (0, 1]; 1 keeps all tokens
--top_k=300 | --top_k=300: larger than the vocabulary ... 256 tokens; 0 keeps all
--stop=zzz | --stop=zzz: not one token of the model's ... give tokens, such as <|im_end|>, separated by commas
--task=/no/such.jsonl | --task=/no/such.jsonl: no such file; give `arith` or the path of a JSONL, JSON or Parquet file
--task=no_answer.jsonl | no_answer.jsonl, line 2: no `answer` that is a text or a number; add one
--task=unreadable.jsonl | unreadable.jsonl: Permission denied; ... name a different path, or get permission
--arith=explain=-1 | --arith=explain=-1: explain=-1: must be a whole number, 0 or more
--steps=3 | --steps: no such flag; see --help
--objective=tis | --objective: no such flag; see --help
--num_samples=4 | --num_samples: no such flag; did you mean --samples?
--config=cut.toml | --config: no such flag; see --help
-k 4 | -k: flags are written --key=value
        """,
    ),
    *rows(
        "-m probe --rollout=hf --model=POLICY --max_tokens=8 --dtype=float32",
        r"""
--actor=/no/such | --actor=/no/such: no model there; ... give a run folder, a checkpoint
--actor=no_weights | no_weights: no weights there (model.safetensors ... copy the folder again, or delete
--actor=small_vocabulary | small_vocabulary: its tokenizer has 256 ... give the model the
--actor=other_words | --actor=other_words: its tokenizer ... actor and policy must share one vocabulary
--samples=1 | --samples=1: must be at least 2, since the report compares responses
--micro_tokens=0 | --micro_tokens=0: must be at least 1
--log_ratio_clamp=0 | --log_ratio_clamp=0.0: must be above 0
--synced_from=/no/such | --synced_from=/no/such: no model there; ... give a run folder, a checkpoint
--synced_from=ACTOR | --synced_from=ACTOR: the shape differs from the model that samples; give older
--explain --router_replay | --explain: it switches ... leave out --router_replay
--learner_quant=aligned | --learner_quant=aligned: the rollouts are ... name a --rollout_quant, or name the
--actor=ACTOR --rollout_quant=int8 --learner_quant=aligned | --learner_quant, --router_replay: ... leave out
--actor=ACTOR --router_replay | --learner_quant, --router_replay: ... only if the policy samples; leave out --actor
--dtype=float8 | --dtype=float8: not one of float32, bfloat16, float16; did you mean float32?
--top_k=5 --logprobs_mode=raw | --logprobs_mode=raw: raw ... use processed, or --keep_sampling_mask=off
        """,
    ),
    # plot.py
    *rows(
        "-m machinery.plot",
        r"""
| name at least one run folder: python -m machinery.plot out/demo
nowhere | nowhere/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
'' | metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
file | file/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
notes | notes/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
run/metrics.jsonl | run/metrics.jsonl/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
run nowhere | nowhere/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
metrics_empty | metrics_empty/metrics.jsonl: no line of metrics in it; ... wait for the run's first update, or
metrics_blank | metrics_blank/metrics.jsonl: no line of metrics in it; ... wait for the run's first update, or
metrics_junk | metrics_junk/metrics.jsonl: no line of metrics in it; ... wait for the run's first update, or
metrics_binary | metrics_binary/metrics.jsonl: no line of metrics in it; ... wait for the run's first update, or
metrics_of_lists | metrics_of_lists/metrics.jsonl: no line of metrics in ... wait for the run's first update, or
metrics_text_step | metrics_text_step/metrics.jsonl: no line of metrics in ... wait for the run's first update, or
metrics_no_step | metrics_no_step/metrics.jsonl: no line of metrics in it; ... wait for the run's first update, or
metrics_text | metrics_text/metrics.jsonl: reward is not a number at step 1; fix or remove that line
metrics_list | metrics_list/metrics.jsonl: entropy is not a number at step 1; fix or remove that line
metrics_truth | metrics_truth/metrics.jsonl: grad_norm is not a number at step 7; fix or remove that line
metrics_folder | metrics_folder/metrics.jsonl: no such file; give the folder of a run (it holds metrics.jsonl)
metrics_unreadable | metrics_unreadable/metrics.jsonl: Permission denied; ... name a different path, or get permission
run run run run run run run run | 8 runs: at most 7 lines can be distinguished; draw fewer runs in one picture
run --out=x.xyz | --out=x.xyz: the name of a picture must end in .png, .pdf or .svg
run --out=x | --out=x: the name of a picture must end in .png, .pdf or .svg
run --out= | --out is empty: name the file to write
run --out=notes | --out=notes: a folder; name a file in this folder
run --out=file/x.png | --out=file/x.png: ... is a file, not a folder; name a different path
run --out=read_only/x.png | --out=read_only/x.png: ... cannot be written; name a different path
run --out=/proc/x.png | --out=/proc/x.png: /proc cannot be written; name a different path
run --ouput=x.png | --ouput: no such flag; did you mean --out?
run --smooth=3 | --smooth: no such flag; see --help
--out=x.png run | run: flags are written --key=value
--samples | --samples: a value is missing; write --samples=VALUE
--samples=nowhere | nowhere/samples.jsonl: no such file; give the folder of a run of train.py
--samples=run | run/samples.jsonl: no such file; give the folder of a run of train.py
--samples=responses_empty | responses_empty/samples.jsonl: no responses in it; ... wait for the run's first update,
--samples=responses_junk | responses_junk/samples.jsonl: no responses in it; ... wait for the run's first update,
--samples=responses_metrics | responses_metrics/samples.jsonl: the line of step 0 is not a response; fix or remove it
--samples=responses_text | responses_text/samples.jsonl: the line of step 0 is not a ... fix or remove it
--samples=responses_null | responses_null/samples.jsonl: the line of step 0 is not a ... fix or remove it
--samples=responses_uneven | responses_uneven/samples.jsonl: the line of step 0 is not a response; fix or remove it
--samples=responses --last=0 | --last=0: must be at least 1
--samples=responses --last=-1 | --last=-1: must be at least 1
--samples=responses --last=x | --last=x: must be a whole number
run --samples=responses | --samples=responses: prints responses and draws no runs; leave out run
        """,
    ),
    # bench.py and the tools of remote/
    *rows(
        "-m bench",
        r"""
haed | haed: no such list; write python -m bench gpu
'' | no list: no such list; write python -m bench gpu
gpu | gpu: there is no GPU here; try the script with --device=cpu --scale=tiny
gpu --scale=tiny | gpu: there is no GPU here; try the script with --device=cpu
head gpu | head gpu: no such list; write python -m bench gpu
gpu --device=cpu --parts=haed | --parts=haed: no such part; there are tests, vllm, linears, head,
gpu --device=cpu --parts= | --parts is empty: name one or more of tests, vllm, linears, head,
gpu --device=cpu --part=haed | --part=haed: no such part; there are tests, vllm, linears, head,
gpu --device=cpu --minutes=0 | --minutes=0: must be above 0
gpu --device=tpu | --device=tpu: not one of cuda, cpu
gpu --device=cpu --out=file/x | --out=file/x/gpu.json: ... is a file, not a folder; name a different path
        """,
    ),
    *rows(
        "tests/remote_tools/bench.py",
        r"""
wires | wires: no such benchmark; there are wire, samplers; did you mean wire?
--mib=3 | --mib=3: no such flag, only names of benchmarks; there are wire, samplers
        """,
    ),
    *rows(
        "tests/remote_tools/fuzz.py",
        r"""
--frames=29 | --frames=29: at least 30
--frame=30 | --frame: no such flag; did you mean --frames?
        """,
    ),
    # python -m remote.keys
    *rows(
        "-m remote.keys",
        r"""
| name one new folder: python -m remote.keys keys --samplers=4
a b | name one new folder: python -m remote.keys keys --samplers=4
'' | name one new folder: python -m remote.keys keys --samplers=4
k --samplers=0 | --samplers=0: a number from 1 to 4096
k --samplers=4097 | --samplers=4097: a number from 1 to 4096
k --samplers=two | --samplers=two: must be a whole number
k --samplers | --samplers: a value is missing; write --samplers=VALUE
k --sampler=2 | --sampler: no such flag; did you mean --samplers?
--samplers=2 | name one new folder: python -m remote.keys keys --samplers=4
--samplers=2 k | k: flags are written --key=value
file | file is a file; name a new folder
file/k | file/k/learner: Not a directory; name a different path
notes | notes is not empty: keys are not overwritten; name a new folder
keys_learner | keys_learner is not empty: keys are not overwritten; name a new folder
/proc/k | /proc/k: No such file or directory; name an existing path
read_only | read_only/learner: Permission denied; name a different path, or get permission for this path
read_only/k | read_only/k: Permission denied; name a different path, or get permission for this path
        """,
    ),
    # a sampler
    *rows(
        "-m remote",
        r"""
| --connect: name the learner's address, tcp://HOST:PORT, or a shared folder
--conect=tcp://127.0.0.1:9 | --conect: no such flag; did you mean --connect?
tcp://127.0.0.1:9 | tcp://127.0.0.1:9: flags are written --key=value
--connect | --connect: a value is missing; write --connect=VALUE
        """,
    ),
    *rows(
        "-m remote --rollout=hf --name=box",
        r"""
--connect=127.0.0.1:5555 | --connect=127.0.0.1:5555: neither an address such as ... ORT nor an existing folder
--connect=http://127.0.0.1:5555 | --connect=http://127.0.0.1:5555: not an address; write tcp://HOST:PORT
--connect=tcp://127.0.0.1 | --connect=tcp://127.0.0.1: no port; write tcp://HOST:PORT
--connect=tcp://127.0.0.1:0 | --connect=tcp://127.0.0.1:0: a port is a number from 1 to 65535
--connect=tcp://127.0.0.1:99999 | --connect=tcp://127.0.0.1:99999: a port is a number from 1 to 65535
--connect=tcp://127.0.0.1:5555/ | --connect=tcp://127.0.0.1:5555/: no port; write tcp://HOST:PORT
--connect=tcp://:5555 | --connect=tcp://:5555: no host; write tcp://HOST:PORT
--connect=tcp:// | --connect=tcp://: not an address; write tcp://HOST:PORT
--connect=ipc:// | --connect=ipc://: not an address; write tcp://HOST:PORT
--connect=tcp://10.0.0.1:5555 | --connect=tcp://10.0.0.1:5555: ... `python -m remote.keys OUT --samplers=N` makes
--connect=tcp://127.0.0.1:9, | --connect=: not an address; write tcp://HOST:PORT
--connect=tcp://127.0.0.1:9,notes | --connect=notes: not an address; write tcp://HOST:PORT
--connect=, | --connect=,: neither an address such as tcp://HOST:PORT nor an existing folder
--connect=file | --connect=file: neither an address such as tcp://HOST:PORT nor an existing folder
        """,
    ),
    *rows(
        "-m remote --connect=tcp://127.0.0.1:9 --name=box --rollout=hf",
        r"""
--name=a/b | --name=a/b: a sampler's name is 1 to 64 letters, digits, - and _
--name=a.b | --name=a.b: a sampler's name is 1 to 64 letters, digits, - and _
--name=ä | --name=ä: a sampler's name is 1 to 64 letters, digits, - and _
--keys=/no/such | --keys=/no/such: no learner.key there; ... copy the folder that `python -m remote.keys`
--keys= | --keys=: no learner.key there; copy the folder that `python -m remote.keys` made for this sampler
--keys=file | --keys=file: no learner.key there; copy the folder that `python -m remote.keys` made for this sampler
--keys=keys_learner | --keys=keys_learner: the learner's folder; name a sampler's folder, such as sampler0 next to it
--keys=keys_sampler_open | --keys=keys_sampler_open: sampler0.key_secret can be read ... chmod 600 it, or make new
--keys=keys_sampler_junk | --keys: keys_sampler_junk/learner.key is not a file of keys; copy it again, or make new keys
--keys=keys_sampler_short | --keys: keys_sampler_short/learner.key is not a file of ... copy it again, or make new keys
--keys=keys_sampler_empty | --keys: keys_sampler_empty/sampler0.key_secret is no ... copy it again, or make new keys
--keys=keys_sampler_public | --keys=keys_sampler_public: no secret key in ... copy it again, or make new keys
--spool=file | --spool=file: cannot be written (File exists); name a different folder
--spool=file/spool | --spool=file/spool: cannot be written (Not a directory); name a different folder
--spool=read_only/spool | --spool=read_only/spool: cannot be written (Permission denied); name a different folder
--spool=locked | locked: another sampler uses this folder; give this sampler a different --name or --spool
--groups=0 | --groups=0 --spool_groups=4096: --groups must be at least 1, and --spool_groups at least --groups
--groups=9 --spool_groups=4 | --groups=9 --spool_groups=4: --groups must be at least 1, and ... at least --groups
--give_up=0 | --give_up=0.0: must be above 0
--give_up=nan | --give_up=nan: must be a number
--patience=0 | --patience=0.0: must be above 0
--patience=inf | --patience=inf: must be finite
--task=/no/such.jsonl | --task=/no/such.jsonl: no such file; copy the learner's file here and name it with --task
--rollout_quant=int4 | --rollout_quant=int4: not one of auto, none, int8, fp8, w4a16, w3a16, ... did you mean int8?
--rollout_quant=aligned | --rollout_quant=aligned: not one of auto, none, int8, fp8, w4a16,
--rollout_memory=-2 | --rollout_memory=-2.0: must not be negative
--delay=constant --delay_min=9 --delay_max=1 | --delay_min=9.0 --delay_max=1.0: ... ve 0 and not above the longest
--delay=lognormal --delay_min=0 | --delay_min=0.0 --delay_max=1800.0: the ... ve 0 and not above the longest
--delay=uniform | --delay=uniform: not one of none, constant, lognormal, weibull, ... did you mean lognormal?
--samplers=tcp://127.0.0.1:9 | --samplers: no such flag; see --help
--max_tokens=8 | --max_tokens: no such flag; see --help
WITHOUT=vllm --rollout=vllm | --rollout=vllm: vLLM is not installed here; ... install it (make demo does), or
        """,
    ),
    # studies
    *rows(
        "results/sweep.py",
        r"""
| no study: no such study; name one of jackpot, tis, praxis, qarl, real, heterorl, worth
--draw | --draw: no such study; name one of jackpot, tis, praxis, qarl, real, heterorl, worth
jackpots | jackpots: no such study; name one of jackpot
jackpot --jobs=0 | --jobs=0: must be at least 1; name the number of runs at a time
jackpot --jobs=x | --jobs=x: must be a whole number
jackpot --only=nothing | --only=nothing: no row has this text in its name; leave the flag out to run all rows
jackpot --drwa | --drwa: no such flag; did you mean --draw?
jackpot --draw=yes | --draw=yes: not one of True, true, False, false
jackpot --steps=3 | --steps: no such flag; see --help
jackpot draw | draw: flags are written --key=value
        """,
    ),
    *rows(
        "results/exact.py",
        r"""
--tokens=x | --tokens=x: must be a whole number
        """,
    ),
    *rows(
        "results/ladder.py",
        r"""
x | x: results/ladder.py takes no flags; leave them out
        """,
    ),
    *rows(
        "results/conformance.py",
        r"""
x | x: results/conformance.py takes no flags; leave them out
        """,
    ),
    *rows(
        "results/against_trl.py",
        r"""
--steps=3 | --steps=3: results/against_trl.py takes no flags; leave them out
WITHOUT=trl | TRL 1.16 is needed; the head of this file says how to install it
        """,
    ),
]


# ---------------------------------------------------------------------------------------------------------------------
# The tests
# ---------------------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, tuple]:
    """Every path below a folder with its type, permissions and bytes."""
    paths = {}
    for path in sorted(folder.rglob("*")):
        content = ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        paths[str(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return paths


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
        while re.match("[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        return Job(environment, words, here, tree(here))

    yield prepare_job
    for file in HELD:
        file.close()
    HELD.clear()


def with_models(text: str) -> str:
    for name, folder in MODELS.items():
        text = text.replace(name, str(folder))
    return text


@pytest.fixture(scope="module")
def answers(prepared, request):
    """{command: (job, outcome)} of each selected row. Rows without an environment share a process."""
    tested = [item for item in request.session.items if item.path == request.path]
    rows = [item for item in tested if item.originalname == "test_a_row_gets_one_sentence"]
    wanted = [item.callspec.params["command"] for item in rows]
    jobs = {command: prepared(command) for command in wanted}
    shared = [command for command in wanted if not jobs[command].environment]
    outcomes = dict(zip(shared, run_jobs([jobs[command] for command in shared]), strict=True))
    for command in wanted:
        if command not in outcomes:
            outcomes[command] = run_jobs([jobs[command]])[0]
    return {command: (jobs[command], outcomes[command]) for command in wanted}


@pytest.mark.parametrize("command, words", ROWS)
def test_a_row_gets_one_sentence(answers, command, words):
    job, done = answers[command]
    text = job.said()
    assert done.status == 1, (done.status, text[-2000:])
    assert len(text.splitlines()) == 1, text[-2000:]
    assert text.startswith("error: ")
    at = 0
    for part in with_models(words).split(" ... "):
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)
    assert len(text) < 700
    assert done.processor < SECONDS and done.clock < 3 * SECONDS
    assert tree(job.here) == job.before


REAL = [
    "train.py --rollout=hf --steps=x",
    "eval.py --model=config_cut --rollout=hf",
    "-m remote.keys k --samplers=0",
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in (
            "-m remote --conect=tcp://127.0.0.1:9",
            "-m machinery.plot metrics_junk",
            "results/against_trl.py --steps=3",
            f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN} --task=no_answer.jsonl",
            f"train.py --rollout=hf --model=POLICY --actor=none --objective=grpo {OWN} --model=weights_cut",
            "-m machinery.warmstart --size=3",
            "mini.py --stps=3",
            "metrics.py out/demo",
            "-m bench haed",
            "tests/remote_tools/bench.py wires",
            "tests/remote_tools/fuzz.py --frames=29",
            "results/sweep.py",
            "results/sweep.py jackpot --jobs=0",
        )
    ),
]


@pytest.mark.parametrize("command", REAL)
def test_a_separate_process_gives_the_same_answer(prepared, command):
    """A separate process, with its imports, gives the status and the sentence of a fork."""
    assert command in dict(ROWS)
    job, real_job = prepared(command), prepared(command)
    done = run_jobs([job])[0]
    argv = job.argv if job.argv[0] == "-m" else [str(ROOT / job.argv[0]), *job.argv[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT) * (argv[0] == "-m")}
    real = subprocess.run(
        [sys.executable, *argv], cwd=real_job.here, env=env, capture_output=True, text=True, timeout=60
    )
    assert (real.returncode, real.stderr) == (done.status, job.said())
    assert tree(real_job.here) == real_job.before


HERE = [sys.executable, str(ROOT / "train.py"), "--rollout=hf"]


@pytest.mark.parametrize(
    "name, value, least", [("WORLD_SIZE", "two", 1), ("WORLD_SIZE", "0", 1), ("LOCAL_RANK", "", 0)]
)
def test_a_bad_environment_of_torchrun_is_refused(name, value, least):
    done = subprocess.run(HERE, env={**os.environ, name: value}, capture_output=True, text=True, timeout=60)
    fix = f"in the environment: must be a whole number of at least {least}, as torchrun sets it; unset it"
    assert (done.returncode, done.stderr) == (1, f"error: {name}={value} {fix}\n")


def test_a_world_size_without_ranks(tmp_path):
    """Schedulers leave WORLD_SIZE in the environment of a shell."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    argv = [*HERE, f"--out={tmp_path / 'run'}"]
    done = subprocess.run(argv, env={**environment, "WORLD_SIZE": "2"}, capture_output=True, text=True, timeout=60)
    want = "error: WORLD_SIZE=2 in the environment and no RANK, MASTER_ADDR, MASTER_PORT: start several ranks with "
    assert (done.returncode, done.stderr) == (1, want + "torchrun --nproc_per_node, or unset WORLD_SIZE\n")
    assert not list(tmp_path.iterdir())


def test_closed_streams():
    """A service without standard streams: the command's status is kept, and no file receives output."""
    shell = f"{sys.executable} {ROOT / 'train.py'} --help <&- >&-"
    done = subprocess.run(shell, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(f"{sys.executable} {ROOT / 'eval.py'} --k=0 <&- >&- 2>&-", shell=True, timeout=60)
    assert done.returncode == 1


def test_ctrl_c_while_modules_load():
    """No traceback; the shell sees a process ended by SIGINT."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
    process = subprocess.Popen([*HERE, "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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
