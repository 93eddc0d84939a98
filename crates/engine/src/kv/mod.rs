// SPDX-License-Identifier: Apache-2.0

//! The paged KV cache.
//!
//! - [`block_pool`]: all blocks of one cache, their reference counts and the prefix cache.
//! - [`block_tables`]: the blocks of one sequence, with one table for each KV cache [`group`].
//! - [`block_key`]: block ids and prefix cache keys.
//! - [`events`]: a log of what enters and leaves the prefix cache.

pub mod block_key;
pub mod block_pool;
pub mod block_tables;
pub mod events;
pub mod group;
