// SPDX-License-Identifier: Apache-2.0

//! Quarantine: refuses requests that crash workers.
//!
//! [`QuarantinePolicy`] is a plain value without a clock. [`crate::quarantine_control`] owns it.
//!
//! Requests are identified by their content ([`ContentKey`]), because a client repeats a request
//! that failed. A stream is *on trial* from the time at which the router sends it to a worker until
//! it has more output than at any loss of its content: without a loss, until its first token.
//!
//! ```text
//! worker dies -- suspects on trial there? -- yes: those are candidates
//!                      \-- others on trial? -- yes: those are candidates
//!                                      \--- no:  all contents on that worker are candidates
//! each candidate loses one worker more and becomes a suspect
//!     2 losses, the last time as a suspect and only candidate -> quarantined for a time
//!     it outputs more tokens than at any loss, or ends -------> cleared
//! ```
//!
//! Most candidates are innocent neighbours of one request. So a suspect gets its next trial alone:
//! 1. A suspect enters a worker only if no other content is on trial there.
//! 2. No other content enters a worker while a suspect is on trial there, or waits for that worker.
//! 3. A suspect is on trial at one worker at a time.
//! 4. Contents without a loss wait for at most [`policy::TRIAL_MAX`], so a long prefill delays them
//!    for a bounded time. Contents that were on dead workers wait until the router forces them in
//!    ([`crate::opening::IsolationWait`]).
//!
//! Workers that are killed together say no more about a content than one of them:
//! 1. Only a stream that entered its worker after the last loss counts.
//! 2. A loss within [`KILLED_TOGETHER`] of the last counted loss is not counted. A second worker
//!    may have admitted the stream before it was killed too.
//! 3. After such a loss, the content enters no worker until that time is over. So a request that
//!    crashes workers at once takes two of them in that time, and is blamed for the third.
//!
//! A loss in the middle of the output has many candidates. Those are resumed together the first
//! time, because a killed process is a more likely cause than one of them.
//!
//! A content that crashes each worker later than the one before is cleared each time. So the policy
//! also counts the workers that died with each content ([`QuarantinePolicy::deaths_to_spread`]):
//! 1. After three, the streams of the content are spread over the workers. Each further death
//!    leaves fewer neighbours that were on as many dead workers as the cause.
//! 2. After eight, a content is quarantined if no other content on the last worker was on as many.
//! 3. A suspect does not begin its trial beside a content that was on as many, for at most
//!    [`policy::TRIAL_MAX`].

mod content;
mod policy;
#[cfg(test)]
mod tests;
mod worker_trials;

pub use content::{ContentHasher, ContentKey};
pub use policy::{Blocked, KILLED_TOGETHER, LossVerdict, QuarantineEntry, QuarantinePolicy, StreamId};
