"""What does a model say when some of its bands are hurt?"""

from ropelens.lesions.results import LesionResults
from ropelens.lesions.sweep import lesion_sweep
from ropelens.lesions.tasks import Task, default_tasks, read_tasks

__all__ = ["LesionResults", "Task", "default_tasks", "lesion_sweep", "read_tasks"]
