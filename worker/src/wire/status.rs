// SPDX-License-Identifier: Apache-2.0

//! From errors of the worker to gRPC statuses.

use std::time::Duration;

use engine::{ConstraintError, RefuseReason};
use tonic::Status;
use tonic::metadata::MetadataValue;

use super::request::RequestFieldError;
use crate::engine_loop::SubmitError;
use crate::grammar_compiler::GrammarError;
use crate::token_channel::StreamAbort;

/// Names the field of a refusal for its grammar, because the router's APIs have other names for the
/// grammar.
const FIELD_KEY: &str = "ballast-field";
/// Seconds after which a refused request is worth a retry.
const RETRY_AFTER_KEY: &str = "retry-after";
/// Says that a full queue is the tenant's, not the worker's.
const BOUND_KEY: &str = "ballast-bound";
/// Within this time a step or a compile job ends, and a stopping worker is replaced.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Adds `retry-after` to a refusal.
pub(crate) fn retryable(mut status: Status, after: Duration) -> Status {
    status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from(after.as_secs()));
    status
}

/// The status of a worker that does not serve yet, or no longer.
pub(crate) fn unavailable(message: impl Into<String>) -> Status {
    retryable(Status::unavailable(message), DEFAULT_RETRY_AFTER)
}

impl From<GrammarError> for Status {
    fn from(error: GrammarError) -> Self {
        let message = service::exit::one_line(&error);
        match error {
            GrammarError::Refused(_) | GrammarError::PriorOutput(_) => {
                let mut status = Status::invalid_argument(message);
                status.metadata_mut().insert(FIELD_KEY, MetadataValue::from_static("grammar"));
                status
            }
            GrammarError::QueueFull | GrammarError::QueueTimeout => {
                retryable(Status::resource_exhausted(message), DEFAULT_RETRY_AFTER)
            }
            GrammarError::Stopped => unavailable(message),
            // A retry of the last two would also cost the next worker a thread.
            GrammarError::Vocabulary { .. }
            | GrammarError::Thread(_)
            | GrammarError::TimedOut
            | GrammarError::Panicked => Status::internal(message),
        }
    }
}

impl From<RequestFieldError> for Status {
    fn from(error: RequestFieldError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<SubmitError> for Status {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Refused(RefuseReason::QueueFull { retry_after, .. }) => {
                retryable(Status::resource_exhausted(message), retry_after)
            }
            SubmitError::Refused(RefuseReason::TenantQueueFull { retry_after, .. }) => {
                let mut status = retryable(Status::resource_exhausted(message), retry_after);
                status.metadata_mut().insert(BOUND_KEY, MetadataValue::from_static("tenant"));
                status
            }
            SubmitError::CommandQueueFull | SubmitError::TooManySubscribers => {
                retryable(Status::resource_exhausted(message), DEFAULT_RETRY_AFTER)
            }
            SubmitError::Refused(RefuseReason::Draining) | SubmitError::Stopped => unavailable(message),
            SubmitError::Refused(RefuseReason::DuplicateId(_)) => Status::internal(message),
            SubmitError::Refused(_) => Status::invalid_argument(message),
        }
    }
}

impl From<StreamAbort> for Status {
    fn from(abort: StreamAbort) -> Self {
        let message = abort.to_string();
        match abort {
            StreamAbort::Deadline => Status::deadline_exceeded(message),
            StreamAbort::Drained | StreamAbort::DeviceLost { .. } => Status::unavailable(message),
            StreamAbort::TooSlow | StreamAbort::ChannelFull => Status::aborted(message),
            // The grammar is at fault: every worker would meet its limit.
            StreamAbort::Grammar(ConstraintError::TooComplex | ConstraintError::DeadEnd) => {
                Status::invalid_argument(message)
            }
            StreamAbort::StepFailed { .. } | StreamAbort::BadLogits(_) | StreamAbort::Grammar(_) => {
                Status::internal(message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_retryable_refusals_carry_retry_after() {
        use tonic::Code::{Internal, InvalidArgument, ResourceExhausted, Unavailable};
        let retry_after = Duration::from_secs(7);
        let full = RefuseReason::QueueFull { waiting: 3, max: 3, retry_after };
        let tenant_full = RefuseReason::TenantQueueFull { waiting: 3, max: 3, retry_after };
        let refused = |why| Status::from(SubmitError::Refused(why));
        for (status, code, seconds, bound) in [
            (refused(full), ResourceExhausted, Some("7"), None),
            (refused(tenant_full), ResourceExhausted, Some("7"), Some("tenant")),
            (SubmitError::CommandQueueFull.into(), ResourceExhausted, Some("1"), None),
            (SubmitError::TooManySubscribers.into(), ResourceExhausted, Some("1"), None),
            (refused(RefuseReason::Draining), Unavailable, Some("1"), None),
            (SubmitError::Stopped.into(), Unavailable, Some("1"), None),
            (GrammarError::QueueFull.into(), ResourceExhausted, Some("1"), None),
            (GrammarError::QueueTimeout.into(), ResourceExhausted, Some("1"), None),
            (GrammarError::Stopped.into(), Unavailable, Some("1"), None),
            (GrammarError::TimedOut.into(), Internal, None, None),
            (GrammarError::Panicked.into(), Internal, None, None),
            (refused(RefuseReason::EmptyPrompt), InvalidArgument, None, None),
            (RequestFieldError::EmptyGrammar.into(), InvalidArgument, None, None),
        ] {
            let metadata = |key: &str| status.metadata().get(key).map(|value| value.to_str().unwrap());
            assert_eq!(
                (status.code(), metadata(RETRY_AFTER_KEY), metadata(BOUND_KEY)),
                (code, seconds, bound),
                "{status}"
            );
        }
    }
}
