"""Tasks: generated arithmetic, files, and the grader on cases written for this repository."""

import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import make_cfg

import warmstart
from eval import grade_gold, perturbed, wrapped
from tasks import VOCAB, Arithmetic, Jsonl, Problem, arithmetic_tokenizer, final_answer, grade, read_jsonl


def held_out(problem) -> bool:
    """The rule by which train and test are disjoint: one problem in eight, by the hash of its text."""
    return hashlib.sha256(problem.id.encode()).digest()[0] < 32


def test_arithmetic_is_verifiable_deterministic_and_split():
    task = Arithmetic(seed=3)
    tokenizer = arithmetic_tokenizer()
    train = [task.problem("train", i) for i in range(400)]
    test = [task.problem("test", i) for i in range(200)]
    assert not {p.id for p in train} & {p.id for p in test}
    assert not any(map(held_out, train)) and all(map(held_out, test))
    assert train == [Arithmetic(seed=3).problem("train", i) for i in range(400)]
    assert train != [Arithmetic(seed=4).problem("train", i) for i in range(400)]
    for p in train + test:
        words = p.id.split()
        total = int(words[0])
        for sign, b in zip(words[1::2], words[2::2], strict=True):
            assert 1 <= int(b) <= 9
            total += int(b) if sign == "+" else -int(b)
            assert 0 <= total <= 29
        assert task.find(p.id) == p
        assert str(total) == p.answer
        assert 3 <= len(words) // 2 <= 5
        text = task.solution(p)
        assert task.reward(p, text, True) == 1.0
        assert task.reward(p, text, False) == 0.0
        ids = tokenizer.encode(text)
        assert len(ids) + 1 <= task.max_response()
        assert len(tokenizer.encode(p.prompt)) <= task.max_prompt()
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB >= 256 and VOCAB % 32 == 0


def test_careless_solutions_go_on_from_their_slip():
    task = Arithmetic()
    wrong = 0
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p, slips=0.2)
        wrong += task.reward(p, text, True) == 0.0
        steps = [s.split() for s in text.split(" # ")[0].split(" ; ")]
        assert all(before[4] == after[0] for before, after in pairwise(steps))
        assert text.split(" # ")[1] == steps[-1][4]
    assert 0.3 < wrong / 300 < 0.8


@pytest.mark.parametrize(
    "text, reward", [("3 + 4 = 7 # 7", 1), ("# 7", 1), ("# 8", 0), ("7", 0), ("# 7 ;", 0), ("# 77", 0), ("", 0)]
)
def test_arithmetic_reward(text, reward):
    assert Arithmetic().reward(Problem("3 + 4", "3 + 4 :", "7"), text, True) == reward


@pytest.mark.parametrize(
    "text, reward",
    [
        ("3 + 4 = 7 # 7", 1),
        ("# 7 ; 3 + 4 = 7", 1 + 6 / 8),
        ("# 7 ; ;", 1 + 2 / 8),
        ("# 7" + " ;" * 30, 2),
        ("# 8 ; 3 + 4 = 7", 0),
        ("# 7 # 7", 0),
        ("# 7 ; # 8", 0),
        ("3 + 4 = 7 ; 7", 0),
        ("# 77 ; ;", 0),
        ("", 0),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_reward_of_long_explanations(text, reward, finished):
    """A right answer, one `#`, and a bonus for what stands behind it, whether the response ended or not."""
    assert Arithmetic(explain=8).reward(Problem("3 + 4", "3 + 4 :", "7"), text, finished) == pytest.approx(reward)


def test_demonstrations_with_explanations():
    task = Arithmetic(explain=224)
    tokenizer = arithmetic_tokenizer()
    behind = []
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p)
        steps = text.split(" # ")[0].split(" ; ")
        answer, *restated = text.split(" # ")[1].split(" ; ")
        assert answer == p.answer
        assert set(restated) <= set(steps)
        assert len(tokenizer.encode(text)) + 1 <= task.max_response()
        assert task.reward(p, text, True) == pytest.approx(1 + 6 * len(restated) / 224)
        behind.append(len(restated))
    assert 4 < sum(behind) / 300 < 6
    assert max(behind) == 16
    short = [Arithmetic(explain=7).solution(task.problem("train", i)).split(" # ")[1].count(";") for i in range(50)]
    assert max(short) == 1


RIGHT = [
    ("The total is \\boxed{72}.", "72"),
    ("so we get $\\boxed{\\frac{3}{4}}$", "0.75"),
    ("\\boxed{\\frac{1}{2}}", "\\frac12"),
    ("\\boxed{1{,}000}", "1000"),
    ("\\boxed{x^2+2x+1}", "(x+1)^2"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    ("\\boxed{\\{1,2,3\\}}", "\\{3,2,1\\}"),
    ("\\boxed{[0, 1)}", "[0,1)"),
    ("\\boxed{50\\%}", "50\\%"),
    ("\\boxed{\\pi/2}", "\\frac{\\pi}{2}"),
    ("\\boxed{-3}", "-3"),
    ("\\boxed{2^{10}}", "1024"),
    ("\\boxed{\\text{(B)}}", "\\text{(B)}"),
    ("\\boxed{3.0}", "3"),
    ("\\boxed{x=5}", "5"),
    ("\\boxed{\\$18}", "18"),
]
WRONG = [
    ("\\boxed{73}", "72"),
    ("\\boxed{\\frac{4}{3}}", "0.75"),
    ("I do not know.", "5"),
    ("\\boxed{}", "5"),
    ("\\boxed{(2,1)}", "(1,2)"),
    ("\\boxed{[0,1]}", "[0,1)"),
    ("\\boxed{x^2+1}", "(x+1)^2"),
    ("\\boxed{3}", "-3"),
    ("\\boxed{1025}", "2^{10}"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}"),
    ("\\boxed{\\pi}", "3"),
    ("The answer is 5, no: \\boxed{6}", "5"),
    ("\\boxed{12}", "1200"),
]


@pytest.mark.parametrize("response, answer", RIGHT)
def test_right_answers(response, answer):
    assert grade(response, answer)


@pytest.mark.parametrize("response, answer", WRONG)
def test_wrong_answers(response, answer):
    assert not grade(response, answer)


def test_grade_gold_reads_both_layouts(tmp_path, capsys):
    gsm = tmp_path / "gsm.jsonl"
    math = tmp_path / "math.jsonl"
    gsm_rows = [
        {"question": "2 apples and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "q", "answer": "#### 1,200"},
    ]
    gsm.write_text("".join(json.dumps(row) + "\n" for row in gsm_rows))
    math.write_text('{"problem": "p", "answer": "\\\\frac{1}{2}"}\n\n{"problem": "p", "answer": "x+1"}\n')
    for path in (gsm, math):
        result = grade_gold(str(path))
        assert result == {"file": str(path), "problems": 2, "gold": 1.0, "changed": 0.0}
    assert final_answer("a\n#### 1,200") == "1,200"
    assert perturbed("19") == "29"
    assert perturbed("0.09") == "0.08"
    assert perturbed("x") == "x + 1"
    assert "\\boxed{7}" in wrapped("7")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"problem": "p", "answer": "1"}\n{"problem": "p"}\n', "line 2: no `answer`"),
        ('{"problem": "p", "answer": "1"}\n\n{nope}\n', "line 3: not valid JSON"),
        ('{"answer": "1"}\n', "line 1: no `problem` or `question`"),
        ("[1]\n", "line 1: not a JSON object"),
        ("", "no problems in the file"),
        ('{"problem": "p", "answer": ""}', "line 1: no `answer`"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, sentence):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_jsonl(path)
    with pytest.raises(ValueError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_jsonl_epochs_shuffle_and_prompts_ask_for_a_box(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"problem": "p{i}", "answer": "{i}"}}\n' for i in range(10)))
    task = Jsonl(str(path))
    first = [task.problem("train", i).answer for i in range(10)]
    second = [task.problem("train", 10 + i).answer for i in range(10)]
    assert sorted(first) == sorted(second) == sorted(map(str, range(10)))
    assert first != second
    assert [task.problem("test", i).answer for i in range(10)] == list(map(str, range(10)))
    p = task.problem("test", 3)
    assert task.find(p.id) == p
    assert p.id == "x/3"
    assert p.prompt.startswith("p3\n")
    assert "\\boxed{}" in p.prompt
    assert task.reward(p, "\\boxed{3}", True) == 1.0
    assert task.reward(p, "\\boxed{4}", True) == 0.0


def test_a_base_model_is_made_once_for_each_recipe(tmp_path, monkeypatch):
    """Policy and actor may stop at accuracies of their own: another accuracy is another folder."""
    made = []

    def warm_start(name, task, target, folder):
        made.append((name, target))
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(warmstart, "warm_start", warm_start)
    cfg = make_cfg(base_dir=str(tmp_path), base_accuracy=0.3, actor_base_accuracy=0.1)
    folders = {
        warmstart.base_model(name, c)
        for name in ("policy", "actor")
        for c in (cfg, cfg, replace(cfg, actor_base_accuracy=None))
    }
    assert made == [("policy", 0.3), ("actor", 0.1), ("actor", 0.3)]
    assert len(folders) == len(list(tmp_path.iterdir())) == 3
    assert warmstart.base_model("policy", replace(cfg, task_explain=8)) not in folders


def test_the_default_recipes_keep_their_keys():
    """Base models that were made before are found again."""
    assert warmstart.recipe_key("policy", Arithmetic(), 0.3) == "933ad702bd"
    assert warmstart.recipe_key("actor", Arithmetic(), 0.3) == "6d66f563a3"


def test_a_bonus_does_not_make_a_base_model_more_than_right(folders, monkeypatch):
    """The warm start stops at a share of right answers, whatever an explanation earns on top."""
    from transformers import AutoModelForCausalLM

    def grade_half(task, tokenizer, problems, groups):
        for i, group in enumerate(groups):
            group[0].reward = 1.7 if i % 2 else 0.0

    monkeypatch.setattr(warmstart, "grade_all", grade_half)
    model = AutoModelForCausalLM.from_pretrained(folders / "actor")
    assert warmstart.accuracy(model, arithmetic_tokenizer(), Arithmetic(1, 1, 3, 9), 8) == 0.5


@pytest.mark.parametrize(
    "flag, sentence",
    [
        (dict(task_min_ops=6), "--task_min_ops=6: must be between 1 and --task_max_ops=5"),
        (dict(task_explain=-1), "--task_explain=-1: must be 0 .no explanations. or more tokens"),
        (dict(task_total=200), "--task_total=200: must be below 200 and no less than --task_operand=9"),
    ],
)
def test_bad_flags(flag, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_cfg(**flag)


def test_a_response_longer_than_the_embedded_models_context():
    cfg = make_cfg(model="base:policy", max_tokens=500)
    warmstart.check(cfg, Arithmetic())  # 12 + 500 tokens: the whole context
    with pytest.raises(ValueError, match="--max_tokens=501: with prompts of up to 12 tokens that is over the model's"):
        warmstart.check(replace(cfg, max_tokens=501), Arithmetic())
