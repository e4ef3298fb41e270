"""What a landing leaves out: only what an earlier one ran, and never without saying so."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_architecture import ROOMS
from test_unsteady import outcome

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import run_tests
from landing import changes, suites, zoo
from landing.changes import Parent, find_parent
from landing.suites import tier_of, write_stamp
from landing.zoo import Broken, select

ROOT = Path(__file__).parents[1]
FILES = {
    "rlsdk/interfaces/__init__.py": "",
    "rlsdk/kit/model/hf.py": "from rlsdk.interfaces import Batch\n",
    "rlsdk/testing/plugin.py": "",
    "rlsdk/testing/suites/suite.py": "import rlsdk.config.introspection.describe\n",
    "rlsdk/testing/rollout/sleeping.py": "@requirement('sleep')\ndef test_sleep(): ...\n",
    "rlsdk/testing/rollout/drawing.py": "import rlsdk.kit.model.hf\n@requirement('seed')\ndef test_seed(): ...\n",
    "rlsdk/config/introspection/describe.py": "",
    "rlsdk/trainer/stages/loop.py": "",
    "tests/testing/broken/suites.py": "",
    "tests/testing/broken/naps.py": "from broken.base import x\n",
    "tests/testing/broken/dice.py": "from broken.base import x\n",
    "tests/testing/broken/base.py": "",
    "plugins/vllm/src/engine.py": "",
    "plugins/vllm/README.md": "",
    "plugins/vllm/tested.txt": "vllm==1\n",
    "docs/conformance/vllm.json": "",
}


class Repository:
    """A repository with the files that suites depend on; each commit is a landing, or one of several."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch", "main")
        self.git("config", "user.name", "A")
        self.git("config", "user.email", "a@b")
        self.first = self.commit(FILES)

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, files: dict[str, str]) -> str:
        self.write(files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "m")
        return self.git("rev-parse", "HEAD")

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def report(self, digest: str | None = None, *, passed: bool = True, left_out: int = 0) -> dict[str, str]:
        """The report of a suite whose inputs are those that are here, unless it says others."""
        digest = suites.digest_of(self.root, "vllm") if digest is None else digest
        stamp = {"digest": digest, "date": "2026-11-20", "commit": "0123abcd"}
        document = {"format": 1, "suites": [{"passed": passed, "left_out": left_out}], suites.STAMP: stamp}
        return {"docs/conformance/vllm.json": json.dumps(document)}

    def why_full(self, parent: str) -> str:
        """Why the suite of vLLM runs in full; empty: it does not."""
        tier = tier_of(self.root, "vllm", Parent(commit=parent))
        return tier.why if tier.full else ""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.delenv(changes.VARIABLE, raising=False)
    return Repository(tmp_path)


def test_a_suite_whose_inputs_the_parent_has_a_report_of_is_left_out_and_says_since_when(
    repository: Repository,
) -> None:
    parent = repository.commit(repository.report())
    repository.commit(
        {
            "rlsdk/trainer/stages/loop.py": "1",
            "rlsdk/config/introspection/describe.py": "2",
            "plugins/vllm/README.md": "3",
        }
    )
    tier = tier_of(repository.root, "vllm", Parent(commit=parent))
    assert not tier.full
    assert tier.why == (
        "inputs unchanged since its report of 2026-11-20 (commit 0123abcd); `make check-vllm` runs all of it"
    )


@pytest.mark.parametrize(
    "file",
    [
        "rlsdk/kit/model/hf.py",
        "rlsdk/kit/new.py",
        "rlsdk/testing/plugin.py",
        "plugins/vllm/tested.txt",
        "tools/landing/x.py",
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_a_changed_input_runs_the_suite_in_full(repository: Repository, file: str, committed: bool) -> None:
    parent = repository.commit(repository.report())
    (repository.commit if committed else repository.write)({file: "changed"})
    folder = "/".join(file.split("/")[:2])
    assert repository.why_full(parent) == f"changed since {parent[:8]}: {folder} (1 file)"


def test_a_file_that_is_gone_is_a_change(repository: Repository) -> None:
    parent = repository.commit(repository.report())
    (repository.root / "rlsdk/kit/model/hf.py").unlink()
    assert "rlsdk/kit (1 file)" in repository.why_full(parent)


def test_a_report_that_only_the_landing_has_counts_for_nothing(repository: Repository) -> None:
    """However many commits it has, and whether it is committed at all."""
    parent = repository.commit(repository.report())
    repository.write({"plugins/vllm/src/engine.py": "broken"})
    repository.write(repository.report())
    assert "plugins/vllm (1 file)" in repository.why_full(parent)
    repository.commit({})
    repository.commit({"rlsdk/trainer/stages/loop.py": "and one more commit"})
    assert "plugins/vllm (1 file)" in repository.why_full(parent)
    # Were the inputs not changed, either.
    bare = repository.first
    repository.git("checkout", "--quiet", bare)
    repository.write(repository.report())
    assert repository.why_full(bare).startswith(f"its report in {bare[:8]} is of other inputs; run `make check-vllm`")


def test_a_report_of_inputs_that_the_next_landing_brings_counts_for_nothing(repository: Repository) -> None:
    repository.write({"plugins/vllm/src/engine.py": "broken"})
    forged = repository.report()
    repository.write({"plugins/vllm/src/engine.py": ""})
    parent = repository.commit(forged)
    repository.commit({"plugins/vllm/src/engine.py": "broken"})
    assert "plugins/vllm (1 file)" in repository.why_full(parent)


@pytest.mark.parametrize("report", [{"passed": False}, {"left_out": 97}, {"digest": "0"}])
def test_a_report_of_less_than_a_suite_that_passed_counts_for_nothing(
    repository: Repository, report: dict[str, object]
) -> None:
    parent = repository.commit(repository.report(**report))  # type: ignore[arg-type]
    assert "is of other inputs" in repository.why_full(parent)


@pytest.mark.parametrize("text", ["", "[]", '{"suites": []}', '{"suites": 3}', '{"suites": [{"passed": true}]}'])
def test_a_report_that_cannot_be_read_counts_for_nothing(repository: Repository, text: str) -> None:
    parent = repository.commit({"docs/conformance/vllm.json": text})
    assert "is of other inputs" in repository.why_full(parent)


def test_the_parent_is_given_or_is_where_the_branch_left_origin(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = Path(tmp_path_factory.mktemp("clone")) / "here"
    repository.git("clone", "--quiet", str(repository.root), str(landing))
    clone = object.__new__(Repository)
    clone.root = landing
    clone.git("config", "user.name", "A")
    clone.git("config", "user.email", "a@b")
    # A fresh clone of what is landed names itself.
    assert find_parent(landing).commit is None
    assert "is the landing itself; set LANDING_PARENT" in find_parent(landing).why
    clone.commit({"rlsdk/kit/model/hf.py": "1"})
    second = clone.commit({"rlsdk/kit/model/hf.py": "2"})
    assert find_parent(landing).commit == repository.first, "and not the commit before the last"
    clone.commit({})
    monkeypatch.setenv(changes.VARIABLE, second)
    assert find_parent(landing).commit == second
    assert find_parent(landing, repository.first).commit == repository.first


def test_in_a_fresh_clone_the_landing_says_itself_on_which_commit_it_began(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def parent() -> Parent:
        clone = Path(tmp_path_factory.mktemp("clone")) / "here"
        repository.git("clone", "--quiet", str(repository.root), str(clone))
        return find_parent(clone)

    assert changes.begin(repository.root) == repository.first
    repository.git("add", "--all")
    with pytest.raises(ValueError, match="without changes"):
        changes.begin(repository.root)
    repository.commit({})
    repository.commit({"rlsdk/kit/model/hf.py": "1"})
    assert parent().commit == repository.first
    repository.git("commit", "--quiet", "--allow-empty", "--message", "another landing, which does not say so")
    assert parent().commit == repository.first, "more runs, not less"
    later = repository.commit({})
    repository.commit({})
    repository.commit({changes.NOTED: f"{later}\n"})
    assert "but not the commit that it was written on" in parent().why
    last = repository.commit({changes.NOTED: "nothing\n"})
    assert parent().commit is None
    repository.write({changes.NOTED: f"{last}\n"})
    assert parent().commit is None, "what is not committed says nothing"


def test_without_a_parent_that_can_be_told_everything_runs(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = repository.root
    other = repository.commit({"rlsdk/kit/model/hf.py": "1"})
    repository.git("checkout", "--quiet", "-b", "landing", repository.first)
    head = repository.commit(repository.report())
    shallow = Path(tmp_path_factory.mktemp("clone")) / "shallow"
    repository.git("clone", "--quiet", "--depth", "1", "--branch", "landing", f"file://{root}", str(shallow))
    for where, named, why in (
        (root, None, "LANDING_PARENT is not set and no origin is there"),
        (root, head, "is the landing itself"),
        (root, other, "is not known to be an ancestor of this landing"),
        (root, "nothing", "is no commit of this clone"),
        (shallow, repository.first, "is no commit of this clone; a shallow one may lack it"),
        (shallow, None, "is the landing itself"),
        (tmp_path_factory.mktemp("no repository"), "HEAD", "is no commit of this clone"),
    ):
        parent = find_parent(where, named)
        assert parent.commit is None
        assert why in parent.why
        assert tier_of(where, "vllm", parent) == suites.Tier(engine="vllm", full=True, why=parent.why)
        assert select(where, ENGINES, parent).chosen == ENGINES


def test_inputs_are_all_that_a_suite_can_import() -> None:
    """What they need of each other is held by the table of rooms."""
    named = {path.split("/")[1].removesuffix(".py") for path in (*suites.SHARED, *suites.BUILTIN) if "rlsdk/" in path}
    of_runs = {"cluster", "trainer"}
    assert {*ROOMS["testing"], *ROOMS["reference"], "testing", "reference"} - {"config"} - of_runs <= named
    sources = {file: file.read_text() for file in (ROOT / "rlsdk" / "testing").rglob("*.py")}
    reading = {file.parent.name for file, text in sources.items() if any(f"rlsdk.{room}" in text for room in of_runs)}
    assert reading == {"roles"}, "no suite imports it: it is for tests of runs"
    assert not [file for file, text in sources.items() if "rlsdk.testing.roles" in text and file.parent.name != "roles"]
    top = {path.stem for path in (ROOT / "rlsdk").glob("*.py")} - {"__main__"}
    assert top <= named
    used = [file for file, text in sources.items() if "rlsdk.config" in text and file.parent.name != "roles"]
    assert [file.name for file in used] == ["suite.py"], "the requirement of options is basic: it always runs"
    for paths in (suites.SHARED, *suites.INPUTS.values(), *suites.UNREPORTED.values(), zoo.WATCHED):
        assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {path.stem for path in (ROOT / "docs/conformance").glob("*.json")} >= suites.INPUTS.keys()
    assert {
        path.parent.parent.name for path in ROOT.glob("plugins/*/tests/test_conformance.py")
    } <= suites.INPUTS.keys()


def test_a_report_is_noted_to_be_of_what_it_was_run_on_only(repository: Repository) -> None:
    before = suites.digest_of(repository.root, "vllm")
    repository.write(repository.report(""))
    write_stamp(repository.root, "vllm", before)
    parent = repository.commit({})
    assert repository.why_full(parent) == ""
    with pytest.raises(ValueError, match="changed while it ran; run `make check-vllm` once more"):
        write_stamp(repository.root, "vllm", "0")
    for report in (repository.report(passed=False), repository.report(left_out=1)):
        repository.write(report)
        with pytest.raises(ValueError, match="not of a whole suite that passed"):
            write_stamp(repository.root, "vllm", before)


def test_engines_without_a_kept_report_run_in_full_where_an_input_changed(repository: Repository) -> None:
    """As those that `rlsdk plugins new` writes: the landing that changed one ran them."""
    template = {"rlsdk/cli/plugin_tools/templates/engine.py.in": "1"}
    parent = Parent(commit=repository.commit(template))
    repository.commit({"rlsdk/trainer/stages/loop.py": "1"})
    tier = tier_of(repository.root, suites.PUBLISHED, parent)
    assert not tier.full
    assert tier.why.startswith("inputs unchanged since 20")
    assert f"(commit {str(parent.commit)[:7]}" in tier.why
    repository.write({"rlsdk/cli/plugin_tools/templates/engine.py.in": "2"})
    assert tier_of(repository.root, suites.PUBLISHED, parent).full


NAPS = Broken("rollout", "naps", frozenset({"sleep[deep]"}), "broken.naps")
DICE = Broken("rollout", "dice", frozenset({"seed"}), "broken.dice")
OTHERS = frozenset(Broken("train", f"other-{at}", frozenset({"none"}), "broken.others") for at in range(400))
ENGINES = frozenset({NAPS, DICE, *OTHERS})


@pytest.mark.parametrize(
    ("file", "hit"),
    [
        ("rlsdk/testing/rollout/sleeping.py", {NAPS}),
        ("rlsdk/testing/rollout/drawing.py", {DICE}),
        ("tests/testing/broken/naps.py", {NAPS}),
        ("tests/testing/broken/base.py", {NAPS, DICE}),
        ("rlsdk/testing/suites/suite.py", ENGINES),
        ("tests/testing/broken/suites.py", None),
        ("rlsdk/testing/new.py", None),
        ("rlsdk/kit/model/hf.py", set()),
        ("pyproject.toml", set()),
        ("rlsdk/config/introspection/describe.py", set()),
        ("rlsdk/trainer/stages/loop.py", set()),
    ],
)
def test_broken_engines_run_that_a_change_can_reach_and_an_eighth_of_the_others(
    repository: Repository, file: str, hit: set[Broken] | None
) -> None:
    """None: no engine is reached; one stands for each module of requirements."""
    head = repository.commit({file: f"{FILES.get(file, '')}# Changed\n"})
    found = select(repository.root, ENGINES, Parent(commit=repository.first))
    zoo._imported.cache_clear()
    drawn = {engine for engine in ENGINES if zoo.is_drawn(head, engine)}
    if hit is None:
        hit = zoo.one_each(ENGINES, zoo.requirement_modules(repository.root), head)
        assert hit >= {NAPS, DICE}
        assert len(hit) == 3
    assert found.chosen == drawn | hit
    assert found == select(repository.root, ENGINES, Parent(commit=repository.first))


def test_broken_engines_run_last_and_no_more_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "time", SimpleNamespace(monotonic=lambda: 100.0))
    zoo_suite, other = (run_tests.Suite(name=name, paths=[ROOT / name]) for name in (run_tests.APART[0], "tests/cli"))
    assert run_tests.in_time(other, 0.0) == other
    assert run_tests.in_time(zoo_suite, math.inf).most is None
    assert run_tests.in_time(zoo_suite, 100.0 + 60 * run_tests.ZOO_SECONDS).most == 60
    assert run_tests.in_time(zoo_suite, 0.0).most == run_tests.ZOO_LEAST


def test_each_commit_draws_another_eighth_and_none_is_forgotten() -> None:
    eighths = [{engine for engine in ENGINES if zoo.is_drawn(f"{at:040x}", engine)} for at in range(60)]
    assert all(20 < len(drawn) < 90 for drawn in eighths)
    assert eighths[0] != eighths[1]
    assert len(frozenset().union(*eighths)) > 0.99 * len(ENGINES)


ZOO = run_tests.APART[0]
LEFT_OUT = "97 of 142 requirements of vllm (TestVllm)"


def test_what_was_left_out_is_named_at_the_end_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "ZOO", tmp_path / "zoo.txt")
    tier = suites.Tier(engine="vllm", full=False, why="inputs unchanged")
    broken = "730 of 834 broken engines (rollout): of all, 0 reach what changed"
    parts = {"plugins/vllm": LEFT_OUT, "tests/isolated": "126 of 180 requirements of my-train (T)", ZOO: broken}
    ran = [
        replace(outcome(code=0), suite=run_tests.Suite(name=name, paths=[tmp_path]), left_out=[said])
        for name, said in parts.items()
    ]
    run_tests.print_end(ran, [], {"vllm": tier, "published": replace(tier, why="nothing changed")}, 60.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"NOT RUN: {LEFT_OUT}: inputs unchanged"
    assert lines[1] == "NOT RUN: 126 of 180 requirements of my-train (T): nothing changed"
    assert lines[2] == f"NOT RUN: {broken}: all ran never, as far as is recorded; `make zoo` runs all"
    assert lines[3] == f"60 s; suites that failed: none; run in part: ['plugins/vllm', 'tests/isolated', '{ZOO}']"


def test_when_all_broken_engines_ran_is_noted_only_if_all_passed(tmp_path: Path) -> None:
    file = tmp_path / "zoo.txt"
    ran = [replace(outcome(code=0), suite=run_tests.Suite(name=name, paths=[])) for name in run_tests.APART]
    for others in ([], [replace(ran[1], code=1)], [replace(ran[1], left_out=["1 of 2"])]):
        run_tests.record_zoo(file, [ran[0], *others])
        assert not file.exists()
    run_tests.record_zoo(file, ran)
    assert run_tests.whole_zoo(file).startswith("all ran on 20")


def test_a_run_is_told_what_to_leave_out_and_reads_what_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_tests, "LINES", tmp_path)
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['rlsdk.testing.plugin']\n")
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os\n\nclass TestVllm:\n    backend = 'vllm'\n\n"
        "    def test_one(self):\n        assert os.environ['ZOO_SINCE'] == 'abc'\n"
        f"        print('\\nLEFT OUT: {LEFT_OUT}')\n"
    )
    done = run_tests.run(run_tests.Suite(name="tests/some", paths=[file], basic=["vllm", "torch"], since="abc"))
    assert (done.code, done.counts) == (0, Counter(passed=1))
    assert f"LEFT OUT: {LEFT_OUT}" not in done.left_out
    engines = {suite.name: suite.engines for suite in run_tests.suites() if suite.engines}
    plugins = {f"plugins/{name}": [name] for name in ("deepspeed", "fsdp", "megatron", "sglang", "vllm")}
    assert engines == {"tests/testing": ["torch", "transformers"], "tests/isolated": ["published"], **plugins}
    tiers = {name: suites.Tier(engine=name, full=name != "torch", why="") for name in suites.INPUTS | suites.UNREPORTED}
    narrowed = [run_tests.narrowed(suite, tiers, Parent(commit="abc")) for suite in run_tests.suites()]
    parts = {suite.name: (suite.basic, suite.since) for suite in narrowed if suite.timed_as != suite.name}
    assert parts == {"tests/testing": (["torch"], ""), **{name: ([], "abc") for name in run_tests.APART}}


def test_of_plugins_suites_two_run_at_a_time_and_the_next_suite_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, began, now, most = threading.Lock(), [], Counter[bool](), Counter[bool]()

    def run(suite: run_tests.Suite, **_: object) -> run_tests.Outcome:
        with lock:
            began.append(suite.name)
            now[suite.plugin is not None] += 1
            most.update({key: max(0, count - most[key]) for key, count in now.items()})
        time.sleep(0.05)
        with lock:
            now[suite.plugin is not None] -= 1
        return replace(outcome(code=0), suite=suite)

    monkeypatch.setattr(run_tests, "run", run)
    names = ["plugins/a", "plugins/b", "plugins/c", "tests/d", "tests/e"]
    chosen = [run_tests.Suite(name=name, paths=[Path(name)]) for name in names]
    ended = [one.suite.name for one in run_tests.run_side_by_side(chosen, 3, covered=False)]
    assert sorted(ended) == names
    assert sorted(began[:3]) == ["plugins/a", "plugins/b", "tests/d"]
    assert most[True] == run_tests.ENGINE_JOBS
