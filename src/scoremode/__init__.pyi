"""The public names with their types, for editors and type checkers; ``__init__.py`` loads them on first use."""

from scoremode.cli.cache import cache as cache
from scoremode.cli.completion import completion as completion
from scoremode.cli.info import info as info
from scoremode.core.plan.plan import Plan as Plan
from scoremode.core.scores.columns import Scores as Scores
from scoremode.core.statistics.comparison import Comparison as Comparison
from scoremode.core.statistics.comparison import Comparisons as Comparisons
from scoremode.core.store.run import Run as Run
from scoremode.core.store.runs import load as load
from scoremode.core.text.tokens import Tokens as Tokens
from scoremode.core.verbs.compare import compare as compare
from scoremode.core.verbs.plan import plan as plan
from scoremode.core.verbs.ppl import ppl as ppl
from scoremode.core.verbs.prob.sequence import SequenceProbability as SequenceProbability
from scoremode.core.verbs.prob.sequence import SequenceScore as SequenceScore
from scoremode.core.verbs.prob.sequence import prob as prob
from scoremode.core.verbs.progress import Progress as Progress
from scoremode.core.verbs.reference import reference as reference
from scoremode.core.verbs.session import Model as Model
from scoremode.core.verbs.session import open as open
from scoremode.core.verbs.session import wrap as wrap
from scoremode.errors import ScoremodeError as ScoremodeError
from scoremode.remote.service.command import serve as serve
from scoremode.reports.card import card as card
from scoremode.reports.html.page import report as report
from scoremode.studies.attribution.attribute import attribute as attribute
from scoremode.studies.attribution.layer_profile import DepthProfile as DepthProfile
from scoremode.studies.attribution.layer_profile import layer_profile as layer_profile
from scoremode.studies.attribution.result import Attribution as Attribution
from scoremode.studies.attribution.routing import Routing as Routing
from scoremode.studies.attribution.routing import routing as routing
from scoremode.studies.paths.noise import Noise as Noise
from scoremode.studies.paths.noise import noise as noise
from scoremode.studies.paths.paths import paths as paths
from scoremode.studies.rollouts.mismatch import Mismatch as Mismatch
from scoremode.studies.rollouts.mismatch import mismatch as mismatch
from scoremode.studies.rollouts.rollouts import rollouts as rollouts
from scoremode.studies.rollouts.texts import Rollouts as Rollouts
from scoremode.studies.tasks.lm_eval_command import lm_eval as lm_eval
from scoremode.studies.tasks.results import TasksComparison as TasksComparison
from scoremode.studies.tasks.tasks import tasks as tasks
from scoremode.values import Estimate as Estimate

__version__: str
__all__: list[str]
