// SPDX-License-Identifier: Apache-2.0

//! Weights that a process holds: a manifest and two allocations, as they are handed over.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::Bytes;
use handoff::manifest::seal_manifest;
use memory::manifest::{Allocation, Manifest, ManifestDevice};
use memory::memfd::SealedMemfd;

pub struct HeldModel {
    pub generation: u64,
    pub digest: Bytes,
    pub manifest_inode: u64,
    /// The manifest first.
    memfds: Vec<SealedMemfd>,
}

impl HeldModel {
    /// All bytes of the allocations are `fill`.
    pub fn new(generation: u64, model: &str, fill: u8) -> Self {
        let sealed = |bytes: usize| SealedMemfd::from_bytes("fuzz", &vec![fill; bytes]);
        let allocations = [4096, 8192].map(|bytes| sealed(bytes).expect("a memfd can be made"));
        let digest = [fill; 32];
        let manifest = Manifest {
            model: model.to_owned(),
            digest,
            generation,
            files: Vec::new(),
            devices: vec![ManifestDevice::host()],
            layout: 0,
            one_per_tensor: false,
            allocations: allocations
                .iter()
                .map(|memfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() })
                .collect(),
            tensors: Vec::new(),
            gguf_metadata: Bytes::new(),
            created_unix_seconds: u64::from(fill),
        };
        let manifest = seal_manifest(&manifest).expect("a manifest can be sealed");
        let manifest_inode = manifest.inode();
        let memfds = std::iter::once(manifest).chain(allocations).collect();
        Self { generation, digest: Bytes::copy_from_slice(&digest), manifest_inode, memfds }
    }

    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.memfds.iter().map(AsFd::as_fd).collect()
    }

    pub fn duplicates(&self) -> Vec<OwnedFd> {
        let duplicate = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor is free");
        self.fds().into_iter().map(duplicate).collect()
    }
}
