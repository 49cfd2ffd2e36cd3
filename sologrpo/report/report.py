"""Write `reward_curve.png` and `report.html` of a run directory; it reads and writes files only.

Model output reaches the page only through an autoescaping template, and its content policy allows
no other scripts. The page is one file without outside resources.
"""

import base64
import gzip
import hashlib
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from sologrpo.base.files import RECIPE_SETTINGS, REPORT, REWARD_CURVE, write_atomically
from sologrpo.report.charts import draw_accuracies, draw_chapters
from sologrpo.report.evaluation import figures, groups, kinds, list_problems, verdict_sentence
from sologrpo.report.metrics import REWARD, smoothing_window
from sologrpo.report.reading import Run, read_run
from sologrpo.report.summary import facts, time_split
from sologrpo.report.values import Record, flatten, line, number, shorten
from sologrpo.scoring.comparison import pair_with_baselines
from sologrpo.scoring.formats import TRAINED
from sologrpo.scoring.records import Evaluated
from sologrpo.scoring.table import points, share

TEMPLATES = Path(__file__).parent / "templates"
FILTERS = (share, points, number, shorten, line)


def write_report(run_dir: Path, folder: Path | None = None) -> Path:
    """Write `reward_curve.png` and `report.html`, and return the path of the page.

    Any file of the run may be missing or unfinished; the page says so in that place. `folder` is
    where the evaluations are and the page goes, if not the run directory.
    """
    from sologrpo.report.reward_curve import draw_reward_curve  # loads matplotlib, at the end only

    folder = folder or run_dir
    run = read_run(run_dir, folder)
    write_atomically(folder / REWARD_CURVE, draw_reward_curve(run.metrics, run.name))
    return write_page(run, folder / REPORT)


def write_page(run: Run, path: Path) -> Path:
    """Write the page of a run, and return its path."""
    write_atomically(path, render(run_page(run)))
    return path


def run_page(run: Run) -> Record:
    """Return the values of the template for one run."""
    drawn, zero = draw_chapters(run.metrics, run.settings.labels())
    evaluated = _without_other_prompts(run)
    pairs = pair_with_baselines(evaluated)
    first = pairs[0] if pairs else None
    names = ("model_name_or_path", "dataset_name", "rewards", "reward_weights", *RECIPE_SETTINGS)
    recipe = {name: run.config[name] for name in names if run.config.get(name) is not None}
    return {
        "name": run.name,
        "live": None,
        "notes": run.notes,
        "warnings": run.warnings,
        "facts": facts(run, first),
        "groups": [
            {
                "evaluated": group,
                "accuracies": draw_accuracies(group),
                "figures": figures(group),
                "kinds": kinds(group),
            }
            for group in groups(evaluated)
        ],
        "prompt_formats": run.prompt_formats,
        "results": [(label, flatten(e.results)) for label, e in run.evaluations.items()],
        "pairs": pairs,
        "verdict": verdict_sentence(first.numbers) if first and first.numbers else None,
        "problems": list_problems(evaluated, pairs),
        "chapters": drawn,
        "zero": zero,
        "window": smoothing_window(len(run.metrics.get(REWARD, []))),
        "completions": run.completions,
        "time_split": time_split(run.metrics),
        "recipe": flatten(recipe),
        "config": flatten(run.config),
        "environment": flatten(run.environment),
    }


def _without_other_prompts(run: Run) -> dict[str, Evaluated]:
    """Leave out evaluations under untrained prompts: they have a separate table."""
    elsewhere = {
        label
        for table in run.prompt_formats.values()
        for row in table["prompt_formats"].values()
        if row["role"] != TRAINED
        for label in (row["label"], row["baseline"])
    }
    return {label: e for label, e in run.evaluations.items() if label not in elsewhere}


def render(page: Record) -> str:
    """Fill the template; with `live`, the page follows the server it comes from."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({function.__name__: function for function in FILTERS})
    return environment.get_template("report.html.j2").render(
        **page,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(_script()),
        library=_plotly()[0],
        policy=content_policy(page["live"] is not None),
    )


def content_policy(live: bool) -> str:
    """Return the content policy of a page: no scripts but ours, and nothing from elsewhere.

    A live page may ask the server it comes from.
    """
    allowed = f"'sha256-{_hash(_script())}' 'sha256-{_plotly()[1]}'"
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}{connect}; "
        "form-action 'none'; base-uri 'none'"
    )


@cache
def _script() -> str:
    return (TEMPLATES / "report.js").read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Return Plotly's JavaScript, compressed from 5 MB to 2 MB as base64, and its hash."""
    library = get_plotlyjs()
    packed = gzip.compress(library.encode(), mtime=0)
    return base64.b64encode(packed).decode(), _hash(library)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
