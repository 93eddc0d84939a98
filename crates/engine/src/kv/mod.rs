//! The KV cache: block pool, block tables, cache events.

pub mod block_key;
pub mod block_pool;
pub mod block_tables;
pub mod events;
pub mod group;
