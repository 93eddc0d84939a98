//! Drafts: guesses at a sequence's next tokens, computed behind its last token in the same step and kept as far as they
//! turn out right.
//!
//! A step computes the rows `[last token, d1, .., dD]`. The sampler draws from the first row as it always does; if what
//! it draws is `d1`, the second row holds the logits that the next step would have computed, and so on. Whatever is
//! drawn is put out, so a wrong draft costs rows and never changes a token (invariant I5): random numbers are keyed by
//! position, kernels give a row the same bits in any company, and the keys of wrong rows are overwritten before
//! anything reads them.
//!
//! A [`Drafter`] says what may follow, `depth` how far it is worth guessing, `speculation` joins them with the plan.

pub mod depth;
pub mod draft_model;
pub mod draft_tokens;
pub mod drafter;
pub mod prompt_lookup;
pub mod speculation;
