// SPDX-License-Identifier: Apache-2.0

//! Beam search: the most probable outputs of a prompt, instead of random ones.
//!
//! Each beam is a sequence. A step computes the next row of all beams. From the most probable
//! tokens of these rows, [`search::BeamSearch`] chooses how the beams continue. A beam that
//! continues with several tokens is forked: the sequences share its KV blocks.

pub(crate) mod group;
pub mod search;
mod tree;
