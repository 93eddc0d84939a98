// SPDX-License-Identifier: Apache-2.0

//! One load, from open files to filled allocations and their manifest. `mod.rs` has the protocol.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gguf::GgufModel;
use handoff::manifest::seal_manifest;
use memory::manifest::{Allocation, Checksum, FileIdentity, Manifest, TensorEntry};
use memory::memfd::SealedMemfd;
use memory::pack::{PackPlan, Packing};

use super::checksum;
use super::copy::{CopyError, SourceGeneration};
use super::host_reader::{OpenModelFile, ReadProgress, TensorSource};
use super::load_error::ModelLoadError;
use super::target::{CopiedAllocations, FilledAllocations, LoadOverhead, LoadPlan, LoadTarget};

/// The job that the weight-server sends.
pub(super) struct LoaderJob {
    pub(super) generation: u64,
    pub(super) model: String,
    /// The weight-server opened these files; the loader opens none.
    pub(super) files: Vec<(FileIdentity, File)>,
    pub(super) packing: Packing,
    pub(super) target: Box<dyn LoadTarget>,
    pub(super) threads: usize,
}

/// A job with valid headers: its sizes are known, and nothing is allocated yet.
pub(super) struct PreparedLoad {
    job: LoaderJob,
    model: GgufModel,
    pub(super) plan: LoadPlan,
}

/// The descriptors of a complete generation, which no process can write to any more.
#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) manifest: SealedMemfd,
    pub(super) allocations: Vec<OwnedFd>,
    /// Time in which the bytes were copied from another device; zero if files were read.
    pub(super) copy_time: Duration,
}

impl LoaderJob {
    /// Validates the headers of all files and plans the memory.
    pub(super) fn prepare(mut self) -> Result<PreparedLoad, ModelLoadError> {
        self.check_unchanged()?;
        let path = self.files.first().map(|(identity, _)| identity.path.clone()).unwrap_or_default();
        let model = GgufModel::open_with(&path, |path| self.open(path))?;
        gguf::check_model(model.metadata())
            .map_err(|source| ModelLoadError::Model { path: path.clone(), source })?;
        let sources: Vec<TensorSource> = model
            .tensors()
            .map(|(file, tensor)| TensorSource {
                name: tensor.name.clone(),
                file,
                offset: model.files()[file].header.file_offset(tensor),
                bytes: tensor.bytes,
            })
            .collect();
        let tensor_sizes = self.target.tensor_sizes(&model)?;
        let mut pack = PackPlan::new(&tensor_sizes, self.packing)
            .map_err(|source| ModelLoadError::Pack { path, source })?;
        self.target.finish_plan(&sources, &mut pack)?;
        Ok(PreparedLoad { job: self, model, plan: LoadPlan { sources, tensor_sizes, pack } })
    }

    /// The open file with this path, positioned at its start.
    fn open(&self, path: &Path) -> io::Result<(File, u64)> {
        let found = self.files.iter().find(|(identity, _)| identity.path == path);
        let (identity, file) = found.ok_or(io::ErrorKind::NotFound)?;
        let mut file = file.try_clone()?;
        file.seek(SeekFrom::Start(0))?;
        Ok((file, identity.bytes))
    }

    fn check_unchanged(&self) -> Result<(), ModelLoadError> {
        for (identity, file) in &self.files {
            let path = || identity.path.clone();
            let metadata =
                file.metadata().map_err(|source| ModelLoadError::Inspect { path: path(), source })?;
            if !FileIdentity::of(path(), &metadata).is_same_file(identity) {
                return Err(ModelLoadError::Changed { path: path() });
            }
        }
        Ok(())
    }
}

impl PreparedLoad {
    /// The approximate size of the manifest: names and metadata dominate.
    pub(super) fn manifest_bytes(&self) -> u64 {
        /// Numbers, checksums and tags of one tensor.
        const TENSOR_ENTRY_BYTES: u64 = 128;
        let names: u64 =
            self.plan.sources.iter().map(|source| source.name.len() as u64 + TENSOR_ENTRY_BYTES).sum();
        self.model.metadata().bytes().len() as u64 + names
    }

    pub(super) fn peer_devices(&self) -> Vec<String> {
        self.job.target.peer_devices()
    }

    pub(super) fn overhead(&self) -> LoadOverhead {
        self.job.target.overhead(&self.plan)
    }

    /// Fills the target and checks that the files have not changed in the meantime.
    pub(super) fn load(&self, progress: &ReadProgress) -> Result<LoadedModel, ModelLoadError> {
        let files: Vec<OpenModelFile> = self
            .job
            .files
            .iter()
            .map(|(identity, file)| {
                let path = identity.path.clone();
                match file.try_clone() {
                    Ok(file) => Ok(OpenModelFile { path, file }),
                    Err(source) => Err(ModelLoadError::Inspect { path, source }),
                }
            })
            .collect::<Result<_, _>>()?;
        let filled = self.job.target.fill(&self.plan, files, self.job.threads, progress);
        // A file that shrank reads as truncated; that it changed is the better error.
        self.job.check_unchanged()?;
        let filled = filled?;
        let FilledAllocations { fds, entries, raw, laid_out } = filled;
        let checksum = |(raw, laid_out): (&Vec<u128>, &Vec<u128>)| {
            (checksum::tensor_checksum(raw), checksum::tensor_checksum(laid_out))
        };
        let checksums: Vec<_> = raw.iter().zip(&laid_out).map(checksum).collect();
        let manifest = self.manifest(entries, &checksums);
        let manifest = seal_manifest(&manifest).map_err(ModelLoadError::Seal)?;
        Ok(LoadedModel { manifest, allocations: fds, copy_time: Duration::ZERO })
    }

    /// Copies the model from another device and checks the copy.
    pub(super) fn copy(
        &self,
        source: SourceGeneration,
        progress: &ReadProgress,
    ) -> Result<LoadedModel, ModelLoadError> {
        let LoaderJob { files, target, threads, .. } = &self.job;
        let files: Vec<FileIdentity> = files.iter().map(|(identity, _)| identity.clone()).collect();
        source.check(&files, &self.model, &self.plan, target.layout())?;
        let CopiedAllocations { fds, entries, laid_out, copy_time } =
            target.copy(&self.plan, &source, *threads, progress)?;
        source.compare(&laid_out)?;
        self.job.check_unchanged()?;
        let manifest = self.manifest(entries, &source.checksums());
        if manifest.digest != source.manifest.digest {
            return Err(CopyError::Digest { device: source.device() }.into());
        }
        let manifest = seal_manifest(&manifest).map_err(ModelLoadError::Seal)?;
        Ok(LoadedModel { manifest, allocations: fds, copy_time })
    }

    /// `checksums` has those of each tensor in the file and in memory.
    fn manifest(&self, allocations: Vec<Allocation>, checksums: &[(Checksum, Checksum)]) -> Manifest {
        let layout = self.job.target.layout();
        let tensors: Vec<TensorEntry> = self
            .model
            .tensors()
            .zip(self.plan.pack.placements.iter().zip(&self.plan.tensor_sizes))
            .zip(checksums)
            .map(|(((_, tensor), (placement, &bytes)), &(raw_checksum, checksum))| TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype.id(),
                layout,
                shape: tensor.dims.clone(),
                shard: None,
                allocation: placement.allocation,
                offset: placement.offset,
                bytes,
                raw_checksum,
                checksum,
            })
            .collect();
        let headers = self.model.files().iter().map(|file| &file.header.bytes()[..]);
        let digest = checksum::model_digest(headers, tensors.iter().map(|tensor| tensor.raw_checksum));
        Manifest {
            model: self.job.model.clone(),
            digest,
            generation: self.job.generation,
            files: self.job.files.iter().map(|(identity, _)| identity.clone()).collect(),
            devices: vec![self.job.target.device()],
            layout,
            one_per_tensor: self.job.packing == Packing::OnePerTensor,
            allocations,
            tensors,
            gguf_metadata: self.model.metadata().bytes().clone(),
            created_unix_seconds: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }
}
