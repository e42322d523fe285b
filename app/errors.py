"""Every error Longspan raises on purpose, with the HTTP status and the exit code it becomes.

    LongspanError                    500   exit 1
    ├── ConfigError                  400   exit 2   a field of the configuration; `field` is its dotted path
    ├── CheckpointError              500   exit 3   a file or tensor of the model; `file`, `tensor`
    ├── PreflightError               500   exit 4   the machine cannot run this configuration
    ├── RequestError                 400            the caller can mend it; `param` names the field
    │   ├── InvalidRequestError      400
    │   ├── ContextLengthError       400            prompt + max_tokens can never fit
    │   ├── ModelNotFoundError       404
    │   ├── NotFoundError            404            no such route
    │   ├── MethodNotAllowedError    405
    │   └── PayloadTooLargeError     413
    ├── RetryableError                              the caller may try again after `retry_after_s`
    │   ├── OverloadedError          429
    │   ├── UnavailableError         503
    │   │   └── ReplicaLostError     503            the replica's engine or process has ended: another may serve
    │   └── DeadlineExceededError    504
    └── EngineError                  500            a fault of ours
        └── RankLostError            500            another rank of the engine is gone or stuck: the engine ends

Errors cross process boundaries, so each one pickles from its keyword arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class LongspanError(Exception):
    """Base of the tree. `code` is the machine-readable name in an OpenAI error body."""

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Callable[..., LongspanError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(cls: type[LongspanError], message: str, details: dict[str, Any]) -> LongspanError:
    return cls(message, **details)


class ConfigError(LongspanError):
    """A configuration that cannot be used; the message starts with the field's dotted path."""

    status = 400
    exit_code = 2
    kind = "config_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.field = field


class CheckpointError(LongspanError):
    """A checkpoint that cannot be loaded; names the file and, where there is one, the tensor."""

    exit_code = 3
    kind = "checkpoint_error"

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = " / ".join(part for part in (file, tensor) if part)
        super().__init__(f"{where}: {message}" if where else message, file=file, tensor=tensor)
        self.file = file
        self.tensor = tensor
        self._bare_message = message

    def __reduce__(self) -> tuple[Callable[..., LongspanError], tuple[Any, ...]]:
        return _rebuild, (type(self), self._bare_message, self.details)


class PreflightError(LongspanError):
    """The machine cannot run this configuration (memory, device, driver)."""

    exit_code = 4
    kind = "preflight_error"


class RequestError(LongspanError):
    """A request the caller can mend; `param` is the offending field of the request body."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.param = param


class InvalidRequestError(RequestError):
    code = "invalid_value"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class PayloadTooLargeError(RequestError):
    status = 413
    code = "payload_too_large"


class RetryableError(LongspanError):
    """The request was not processed; it may be sent again after `retry_after_s` seconds."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryableError):
    status = 429
    kind = "rate_limit_error"
    code = "overloaded"


class UnavailableError(RetryableError):
    code = "unavailable"


class ReplicaLostError(UnavailableError):
    """The engine or the process that ran the request has ended; nothing more comes from that replica."""


class DeadlineExceededError(RetryableError):
    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class EngineError(LongspanError):
    """A fault inside the engine; the request ends, the server goes on."""

    code = "engine_error"


class RankLostError(EngineError):
    """A collective failed or took too long: the engine cannot go on without the rank it waited for."""
