"""How many artefacts a data set takes: groups here, and images elsewhere.

Where every task has an image, there are as many as tasks; where the harness is in it, times the harnesses. Here there is a group
a repository, and beside them the base, the evaluators and the harnesses, each once.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from tools import output


@frozen
class Counts:
    """Of one data set: tasks, repositories, and groups by role."""

    tasks: int
    repositories: int
    base: int
    task: int
    evaluator: int
    harness: int

    @property
    def artefacts(self) -> int:
        """All groups."""
        return self.base + self.task + self.evaluator + self.harness

    @property
    def images(self) -> int:
        """One a task."""
        return self.tasks

    @property
    def images_with_harness(self) -> int:
        """One a task and harness; without a harness, as if there was one."""
        return self.tasks * max(1, self.harness)

    def described(self) -> dict[str, Any]:
        """For programs."""
        return {
            "tasks": self.tasks,
            "repositories": self.repositories,
            "artefacts": self.artefacts,
            "groups": {"base": self.base, "task": self.task, "evaluator": self.evaluator, "harness": self.harness},
            "one_image_per_task": self.images,
            "one_image_per_task_and_harness": self.images_with_harness,
        }

    def print(self) -> None:
        """For people."""
        groups = f"{self.base} base + {self.task} task + {self.evaluator} evaluator + {self.harness} harness"
        rows = [
            ("tasks", self.tasks, ""),
            ("repositories", self.repositories, ""),
            ("artefacts", self.artefacts, groups),
            ("one image per task", self.images, _times(self.images, self.artefacts)),
            ("one per task and harness", self.images_with_harness, _times(self.images_with_harness, self.artefacts)),
        ]
        output.print_table(("OF THE DATA SET", "NUMBER", ""), rows)


def _times(images: int, artefacts: int) -> str:
    return f"× {images / artefacts:.1f}"
