"""What a splitter is: a frozen dataclass of whole numbers that cuts a text into pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model


class Splitter(ABC):
    """Cuts texts. `reference` is where its rule comes from."""

    name: ClassVar[str]
    reference: ClassVar[str]

    @abstractmethod
    def pieces(self, model: Model, text: str) -> Iterable[str]:
        """The pieces of a text, in its order.

        Args:
            model: whose tokens are counted, if tokens are.

        Raises:
            InputError: the fields make no sense, or the package whose splitter this is, is not installed.
        """


def not_installed(package: str) -> InputError:
    return InputError(f"this splitter needs {package}, which is not installed; pip install {package}")
