"""Mutation tests: break one line of the program at a time; a test must fail.

    python tests/tools/mutants.py                       all, an hour on two cores
    python tests/tools/mutants.py --only=obrs.py        one file
    python tests/tools/mutants.py --jobs=1

Each row is (text, replacement). The text occurs once in the file. A row with a third entry, a reason, is expected to
live. The tests of a file run on the unmodified file first: they must pass. The suite does not run this command."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tqdm import tqdm

os.environ |= {"OMP_NUM_THREADS": "1"}

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900  # seconds; a hanging test counts as failed
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "transformers.models.qwen3.modeling_qwen3"])  # slow imports

# the tests of each file, most sensitive first
TESTS = {
    "objectives.py": (
        "test_regularisers.py test_golden.py test_corrections.py test_obrs.py test_gepo.py test_objectives.py "
        "test_oracle.py"
    ),
    "corrections.py": (
        "test_golden.py test_corrections.py test_obrs.py test_gepo.py test_objectives.py test_config.py test_oracle.py"
    ),
    "obrs.py": "test_golden.py test_corrections.py test_obrs.py test_gepo.py test_objectives.py test_oracle.py",
    "batching.py": "test_objectives.py test_poison.py test_rollout.py test_oracle.py -k 'not vllm'",
    "model/head.py": "test_head.py test_models.py -k '(naive or granite) and not vllm'",
    "model/__init__.py": (
        "test_head.py test_sampling.py test_models.py test_moe.py test_learner.py test_oracle.py -k "
        "'not two_ranks and not vllm'"
    ),
    "learner.py": (
        "test_learner.py test_checkpoint.py test_run.py::test_published_weights_have_the_engines_format -k "
        "'not compiled_layers and not fsdp'"
    ),
    "model/exact.py": "test_exact.py",
    "sync.py": "test_sync.py -k 'not vllm and not prefixes'",
    "quant.py": (
        "test_quant.py test_moe.py test_sync.py::test_a_streamed_model_does_not_change_the_configuration -k 'not vllm'"
    ),
}

MUTANTS = {
    "objectives.py": [
        ('("low", "high", "tbpo_neg_high")', '("low", "high")'),
        ("stats.lam = obrs.solve_lambda(comm.cat(ratios), cfg", "stats.lam = obrs.solve_lambda(ratios, cfg"),
        ("(x * x / 2)", "(x.abs() / 2)"),
        ("**columns_of(new.detach())", "**columns_of(new)"),
        ("on_new = keep * weight * (1.0 if", "on_new = weight * (1.0 if"),
        ("cut = s.clamp(1 - low, 1 + high) * adv", "cut = s.clamp(1 - high, 1 + low) * adv"),
        ("g, value = geo_ratio(log_ratio, mask, clamp), geo", "g, value = geo_ratio(bounded, mask, clamp), geo"),
        ("(p_new > p) & (gap > high)", "(gap > high)"),
        ("value = torch.where(in_band, g, band.detach()) * adv", "value = torch.minimum(g, band) * adv"),
        ("    return batch.logp_ref\n    if cfg.ratio_base", "    return batch.logp_inf\n    if cfg.ratio_base"),
        ("        return new.logp.detach()\n    mean_logp", "        return new.logp\n    mean_logp"),
        (".logp_inf.", ".logp_ref."),
        ("as_actor, of_actor, actor_config(cfg)", "as_actor, stats, actor_config(cfg)"),
        ("        return unreduced.sum() / stats.tokens", "        return unreduced.sum() / mask.sum()"),
        ("= comm.sum([batch", "= map(float, [batch"),
        ("= comm.sum([kept", "= map(float, [kept"),
        ('    if not logged.get("stepped", True):', "    if False:"),
    ],
    "corrections.py": [
        ("        logp_inf=batch.logp_inf,\n        mask=", "        logp_inf=batch.logp_ref,\n        mask="),
        (".clamp_max(0), mask, clamp", ", mask, clamp).clamp_max(1"),
        ("return token_ratio((log_r * mask).cumsum(1), clamp)", "return token_ratio(log_r.cumsum(1), clamp)"),
        ("(sums[1] - sums[0])", "sums[1]"),
        ("2).sum(1) / n", "2).sum(1) / (n - 1)"),
        (
            "mean_logp_new, torch.log1p(-mixing) + log_group_mean",
            "log_group_mean, torch.log1p(-mixing) + mean_logp_new",
        ),
        ("d = logp_inf - logp_new", "d = logp_new - logp_inf"),
        ("share = 0.0 if clamped else logged", "share = logged"),
        ("return token_ratio(seq_sum(log_r, mask), clamp)", "return seq_sum(token_ratio(log_r, clamp), mask)"),
        ("log_r, clamp).clamp(is_floor, is_cap)", "log_r, clamp).clamp_max(is_cap)"),
        ("return log_r.clamp(-clamp, clamp) ** 2 / 2", "return log_r.clamp(-clamp, clamp) ** 2"),
        ("= seq_sum(", "= seq_mean("),
        ("return r, (r <= is_cap).to(r.dtype)", "return r.clamp_max(is_cap), torch.ones_like(r)"),
        ("(z * token_ratio(log_r, clamp)", "z * token_ratio(log_r, clamp"),
        (
            "_, keep = geo_rs(log_r, mask, rs_low, rs_high, clamp)\n    return weight, keep",
            "return weight, torch.ones_like(weight)",
        ),
        ('{"clip_low", "clip_high"} if "surrogate" in other else set()', "set()"),
        ("torch.where(batch.adv < 0, kept, 1.0)", "torch.where(batch.adv > 0, kept, 1.0)"),
        ("        elif hasattr(cfg, name):", "        elif False:"),
        ("kept = max(int((mean <= bound).sum()), 1)", "kept = max(int((mean <= bound).sum()) - 1, 1)"),
        ("high = stats.largest_kept if row.of_batch else high", "high = high"),
        ('            and cfg.ratio_base == "ref"\n', ""),
        ('late = cfg.samplers != "local" or', "late ="),
        ("    on = support_logp.isfinite()", "    on = torch.ones_like(support_logp, dtype=torch.bool)"),
        ('late = of_new or (uses_z and cfg.obrs_target == "new")', "late = of_new"),
    ],
    "obrs.py": [
        ("(log_r - math", "(log_r + math"),
        ("else (u < a)", "else (u[:, :1] < a)"),
        ("rho = rho * (logp_ref - logp_tgt).clamp", "rho = rho * (logp_tgt - logp_ref).clamp"),
        (" / lam).sum(-1)", ").sum(-1) / lam"),
        (" kappa * low", " low"),
        ("return acceptance / mean_z", "return mean_z / acceptance"),
        ("torch.arange(1, len(r) + 1", "torch.arange(len(r)"),
        (".logp_ref,", ".logp_inf,"),
    ],
    "batching.py": [
        ('[response.finish_reason == "length"', '[response.finish_reason == "stop"'),
        ("batch.mask &= ~batch.cut[:, None]", "pass"),
        ("squared_norm = (1 - 2 * logp.exp() + sum_p2)", "squared_norm = (1 + 2 * logp.exp() + sum_p2)"),
        ("torch.where(mask, weight.square() * squared_norm, 0)", "torch.where(mask, weight * squared_norm, 0)"),
        (".cumsum(1) * mask\n", " * mask\n"),
        ("(reward - lowest[group])", "reward"),
        ("(reward.std() + 1e-6)", "(reward.std(correction=0) + 1e-6)"),
        ("index for index, group in enumerate(groups)", "0 for group in groups"),
        ("return [sampling.temperature, sampling", "return [1.0, sampling"),
        ("in group.ref", "in groups[0].ref"),
        ("        first += len(group.responses)", "        first += 1"),
        ("if parts and cost([*parts[-1], row]) <= budget:", "if parts:"),
    ],
    "model/__init__.py": [
        (
            "self.casts[weight] = weight.detach().to(dtype)\n        return self.casts[weight]",
            "return weight.detach().to(dtype)",
        ),
        ("0, group * P + batch.prompt_len - 1", "0, group * P + P - 1"),
        ("row] + t - 1", "row] + t"),
        ("p.mul_(-g).scatter_add_(1, target, g)", "p.mul_(g).scatter_add_(1, target, -g)"),
        ("return x if self.inv_temperature is None else x.mul_(self.inv_temperature[at])", "return x"),
        ("g = g * (p.gather(1, target) > 0)", "g = g * 1"),
        ("inside.mul_(self.support_on[at])", "inside"),
        (" - log_lam", ""),
        ("dz = (q - logp.exp())", "dz = (logp.exp() - q)"),
        ("gone[row, ids[first:last]] = False", "gone[row, ids[: last - first]] = False"),
        ('return p / p.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else p', "return p"),
    ],
    "model/head.py": [
        ("], dz, hidden, weight, ", "], dz, models[0][1], weight, "),
        ("d_weight[read].addmm_(dz.t(), hidden[at])", "d_weight[read].copy_(dz.t() @ hidden[at])"),
        ("d_logits[m].mul_(slopes[m])", "d_logits[m]"),
        ("self.multiply(hidden, weight[: self.width])", "self.multiply(hidden, weight)"),
    ],
    "learner.py": [
        ("self.scaler.scale(loss * self.comm.size).backward()", "self.scaler.scale(loss).backward()"),
        ("                    loss = loss * 0.0", "                    pass"),
        (" and not idle[name]", ""),
        ("self.skipped_in_a_row = 0 if finite else", "self.skipped_in_a_row = self.skipped_in_a_row if finite else"),
        ("self.scaler.unscale_(optimizer)", "pass"),
        ("+ (not overflow)", "+ 1"),
        ("top_logp_inf = top_logp_inf.masked_fill(torch.stack(known, -1), -torch.inf)", "pass"),
        ("if self.comm.any(name):", "if False:"),
    ],
    "model/exact.py": [
        ("return product if isinstance(layer, ExactLinear) else plain_product", "return plain_product"),
        ("z.neg().exp_().add_(1.0)", "z.neg().exp_().add_(1.01)"),
        ("room(K - Q + last)", "room(K - Q + last - 1)"),
        ("UNSEEN * (~padded)", "0.0 * (~padded)"),
        ("torch.cat(outs, 1).transpose(1, 2).reshape", "torch.cat(outs, 1).reshape"),
        ("if self.cached is None or self.cached[0] != version:", "if self.cached is None:"),
        ("                child.multiply = rounded_product", "                pass"),
        ("torch.float32 if head_fp32 else compute)", "torch.float32)"),
        ("gap <= 0 or", "not gap > 0 or"),
        ("<= self.lengths[:, None]", "< self.lengths[:, None]"),
    ],
    "sync.py": [
        ("mixed >>= 29", "pass"),
        ("numbers.to(dtype).view(word)", "numbers.view(word)"),
        ("self._compare(engine, version, rolled(named_tensors), trial=True)", "pass"),
        ("error, floor = self._compare(engine, version, named_tensors)", "pass"),
        ("        if stale:\n", "        if False:\n"),
        ("not error <= limit", "error > limit"),
        ("for a in (1, b)", "for a in (1,)"),
    ],
    "quant.py": [
        ("copy.deepcopy(config), dtype", "config, dtype"),
        ("s = s.to(scales).float()", "pass"),
        ('if not {*name.split(".")} & {*ROUTERS}', 'if name.rpartition(".")[2] not in ROUTERS'),
        ("s = torch.where(amax > 0, amax / qmax, 1.0)", "s = amax / qmax"),
        ("y = y.mul_(sx).mul_(sw.t())", "y = y.mul_(sx)"),
        ("(y * top_k_weights[token, k, None])", "(y * top_k_weights[token, 0, None])"),
        ("dx = g @ dequantize(qw, sw, g.dtype)", "dx = g @ qw.to(g.dtype)"),
        ("if name not in self.cached or self.cached[name][0] != version:", "if name not in self.cached:"),
        ('f"{name}_scale", s\n        else', 'f"{name}_scale", s * 1.01\n        else'),
        ("weight.copy_(dequantize(*fmt.quantize(weight)))", "weight.add_(0 * dequantize(*fmt.quantize(weight)))"),
    ],
}


# -- Runs -------------------------------------------------------------------------------------------------------------


def copy_of_the_repository(folder: Path) -> None:
    """Copy the files in git, and the base models."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    if (ROOT / "out" / "base").is_dir():
        shutil.copytree(ROOT / "out" / "base", folder / "out" / "base")


def arguments(file: str) -> list[str]:
    """Arguments of pytest for the tests of one file."""
    return [f"tests/{a}" if a.startswith("test_") else a for a in shlex.split(TESTS[file])]


def run_tests(folder: Path, file: str) -> None:
    """Run a file's tests in the copy, as a process; output.txt has their output."""
    os.setsid()
    os.chdir(folder)
    with open("output.txt", "w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    sys.path[0] = str(folder)
    os._exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments(file)]))


def broken(folder: Path, file: str, old: str, new: str) -> str:
    """The result of a file's tests with `new` instead of `old`: the first failed test, "hangs", or "" if all pass."""
    whole = (ROOT / file).read_text(encoding="utf-8")
    (folder / file).write_text(whole.replace(old, new), encoding="utf-8")
    tests = FORKS.Process(target=run_tests, args=(folder, file))
    tests.start()
    tests.join(LIMIT)
    status = tests.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)  # with processes that its tests left
    (folder / file).write_text(whole, encoding="utf-8")
    if not status:
        return "hangs" if status is None else ""
    screen = (folder / "output.txt").read_text()
    failed = [line for line in screen.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else screen[-300:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="files whose name holds this; several with commas")
    parser.add_argument("--jobs", type=int, default=2)
    flags = parser.parse_args()
    chosen = [file for file in MUTANTS if any(part in file for part in flags.only.split(","))]
    work = [(file, *row) for file in chosen for row in [("", "", "unmodified"), *MUTANTS[file]]]
    died, failing, folders = 0, [], queue.SimpleQueue()

    def run(row) -> tuple:
        folder, start = folders.get(), time.monotonic()
        fails = broken(folder, *row[:3])
        folders.put(folder)
        return row, fails, time.monotonic() - start

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(flags.jobs) as pool:
        for n in range(flags.jobs):
            copy_of_the_repository(Path(scratch, str(n)))
            folders.put(Path(scratch, str(n)))
        for (file, old, new, *why), fails, seconds in tqdm(pool.map(run, work), "mutants", len(work)):
            if not old:
                failing += [file] if fails else []
                continue
            died += bool(fails)
            tqdm.write(
                f"{'dies ' if fails else 'LIVES'} {seconds:4.0f} s  {file}: {old!r} -> {new!r} {fails} {' '.join(why)}"
            )
    rows = len(work) - len(chosen)
    print(f"{died} of {rows} die ({100 * died / rows:.1f} %); files whose tests fail without a mutant: {failing}")


if __name__ == "__main__":
    main()
