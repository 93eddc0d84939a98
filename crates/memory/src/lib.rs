//! A model's memory: how it is packed, allocated, described and mapped.
//!
//! ```text
//! pack      sizes of tensors -> allocations and the place of each tensor
//! host      memfds on huge pages, filled once        device   CUDA VMM allocations, filled once
//! memfd     seals them                                        exported as file descriptors
//! manifest  what each descriptor holds: the plain value that travels with them
//! host_import, mapping   read-only mappings in another process     device::ImportedModel
//! ```
//! This crate knows no socket and no wire format; the crate `handoff` carries descriptors and the manifest to another
//! process.

pub mod device;
pub mod host;
pub mod host_import;
pub mod manifest;
pub mod mapping;
pub mod memfd;
pub mod pack;
