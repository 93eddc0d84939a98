// SPDX-License-Identifier: Apache-2.0

//! A model's memory: how it is packed, allocated, described and mapped.
//!
//! ```text
//!             host memory                               GPU memory
//! plan        pack: sizes of tensors -> allocations and the place of each tensor
//! fill        host::HostAllocation (memfd, huge pages)  device::WritableModel (CUDA VMM)
//! finish      memfd::SealedMemfd                        exported file descriptors
//! describe    manifest: which tensor lies where, in which allocation
//! map         host_import::import_host (read-only)      device::ImportedModel (read-only)
//! ```
//! [`allocator`] is for the private memory of all processes. [`process_end`] ends those that use a
//! driver.
//!
//! This crate knows no socket and no wire format. The crate `handoff` carries descriptors and the
//! manifest to another process.
//!
//! A model of two tensors, from its sizes to read-only tensors:
//!
//! ```
//! use memory::host::HostAllocation;
//! use memory::host_import::import_host;
//! use memory::manifest::{Allocation, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};
//! use memory::pack::{PackPlan, Packing, TensorPlacement};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sizes = [1000, 24];
//! let plan = PackPlan::new(&sizes, Packing::Slabs)?;
//! assert_eq!(plan.allocations.len(), 1, "small tensors share a slab");
//!
//! // The loader writes each tensor to its place, and seals the allocation.
//! let mut allocation = HostAllocation::create("example", plan.allocations[0])?;
//! let (bytes, backing) = allocation.parts();
//! for (place, size) in plan.placements.iter().zip(sizes) {
//!     backing.ensure(place.offset, size)?;
//!     bytes[place.offset as usize..][..size as usize].fill(7);
//! }
//! let memfd = allocation.seal()?;
//!
//! let tensor = |(index, (place, size)): (usize, (&TensorPlacement, u64))| TensorEntry {
//!     name: format!("tensor.{index}"),
//!     dtype: 24,
//!     layout: LAYOUT_GGML,
//!     shape: vec![size],
//!     shard: None,
//!     allocation: place.allocation,
//!     offset: place.offset,
//!     bytes: size,
//!     raw_checksum: [0; 16],
//!     checksum: [0; 16],
//! };
//! let manifest = Manifest {
//!     model: "example".to_owned(),
//!     digest: [0; 32],
//!     generation: 1,
//!     files: Vec::new(),
//!     devices: vec![ManifestDevice::host()],
//!     layout: LAYOUT_GGML,
//!     one_per_tensor: false,
//!     allocations: vec![Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() }],
//!     tensors: plan.placements.iter().zip(sizes).enumerate().map(tensor).collect(),
//!     gguf_metadata: Default::default(),
//!     created_unix_seconds: 0,
//! };
//! manifest.validate()?;
//!
//! // A worker, which has the manifest and the descriptor, maps the model.
//! let (tensors, watch) = import_host(&manifest, vec![memfd.into()])?;
//! assert_eq!(tensors[1].bytes, &[7; 24][..]);
//! drop(tensors);
//! assert!(watch.is_unmapped());
//! # Ok(())
//! # }
//! ```

pub mod allocator;
pub mod device;
pub mod host;
pub mod host_import;
pub mod manifest;
pub mod mapping;
pub mod memfd;
pub mod numa;
pub mod pack;
pub mod process_end;
