// SPDX-License-Identifier: Apache-2.0

//! The model files, and the copies of their weights in memory. A copy lives as long as any
//! descriptor or mapping of it, which is a reference here.

use std::rc::{Rc, Weak};

use memory::manifest::{FileIdentity, HOST_DEVICE};
use weight_server::catalog::{GenerationContents, LoadKey};

use crate::network::Micros;

pub(crate) const MODELS: [&str; 2] = ["a", "b"];
pub(crate) const ALLOCATIONS: usize = 2;
const TENSOR_BYTES: u64 = 1000;

/// One copy of the weights of a file.
#[derive(Debug)]
pub(crate) struct WeightCopy {
    /// Inode of its manifest.
    pub(crate) inode: u64,
    /// Inode of its file.
    pub(crate) source: u64,
}

/// The files, and all copies.
#[derive(Debug)]
pub(crate) struct WeightFiles {
    /// Inode of the file of each model.
    inodes: [u64; MODELS.len()],
    last_inode: u64,
    copies: Vec<Weak<WeightCopy>>,
}

impl WeightFiles {
    pub(crate) fn new() -> Self {
        Self { inodes: [1, 2], last_inode: 2, copies: Vec::new() }
    }

    pub(crate) fn replace_file(&mut self, model: usize) {
        self.last_inode += 1;
        self.inodes[model] = self.last_inode;
    }

    /// The key of a load of what is at the model's path now.
    pub(crate) fn key(&self, model: &str) -> LoadKey {
        let index = model_index(model);
        let file = FileIdentity {
            path: path_of(model).into(),
            device: 1,
            inode: self.inodes[index],
            bytes: TENSOR_BYTES,
            modified_seconds: 0,
            modified_nanoseconds: 0,
            head_digest: None,
        };
        LoadKey { files: vec![file], device: HOST_DEVICE.to_owned(), layout: 0, one_per_tensor: false }
    }

    pub(crate) fn copies(&self) -> impl Iterator<Item = Rc<WeightCopy>> {
        self.copies.iter().filter_map(Weak::upgrade)
    }

    /// A loader fills memory.
    pub(crate) fn load(&mut self, source: u64) -> Rc<WeightCopy> {
        self.last_inode += 1;
        let copy = Rc::new(WeightCopy { inode: self.last_inode, source });
        self.copies.retain(|copy| copy.strong_count() > 0);
        self.copies.push(Rc::downgrade(&copy));
        copy
    }
}

pub(crate) fn path_of(model: &str) -> String {
    format!("/models/{model}.gguf")
}

pub(crate) fn model_index(model: &str) -> usize {
    usize::from(model != MODELS[0])
}

pub(crate) fn source_of(key: &LoadKey) -> u64 {
    key.files.first().map_or(0, |file| file.inode)
}

pub(crate) fn digest_of(source: u64) -> [u8; 32] {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&source.to_le_bytes());
    digest
}

/// What a loader plans, or has loaded.
pub(crate) fn contents_of(source: u64, inode: u64, now: Micros) -> GenerationContents {
    GenerationContents {
        digest: Some(digest_of(source)),
        tensor_bytes: TENSOR_BYTES,
        allocation_bytes: TENSOR_BYTES,
        manifest_bytes: 10,
        manifest_inode: inode,
        allocations: ALLOCATIONS as u32,
        tensors: 2,
        created_unix_seconds: now / 1_000_000,
        staging_bytes: 0,
        host_bytes: TENSOR_BYTES,
        ..GenerationContents::default()
    }
}
