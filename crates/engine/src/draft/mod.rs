// SPDX-License-Identifier: Apache-2.0

//! Speculative decoding: draft tokens are computed behind the last token of a sequence in the same
//! step, and accepted as far as they are right.
//!
//! ```text
//! rows of a step     t      d1     d2     d3        (t: last token, d: draft tokens)
//! sampled tokens     d1     d2     x                 d1 and d2 are accepted, d3 is rejected
//! next step          x      ...
//! ```
//!
//! The sampler draws from the first row as always. If it draws `d1`, the second row has the logits
//! that the next step would have computed, and so on. A rejected draft costs rows and never changes
//! a token (invariant I5): random numbers are keyed by position, kernels give a row the same bits
//! with any batch neighbours, and later rows overwrite the keys of rejected rows before they are
//! read.
//!
//! A [`drafter`] proposes tokens: [`prompt_lookup`] or a [`draft_model`]. [`depth`] chooses how
//! many tokens pay off. [`speculation`] joins both with the step plan.

pub mod depth;
pub mod draft_model;
pub mod draft_tokens;
pub mod drafter;
pub mod prompt_lookup;
pub mod speculation;
