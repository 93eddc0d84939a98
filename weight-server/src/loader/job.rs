//! One load from open files to sealed memfds and their manifest. No sockets: those are in `mod.rs`.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use gguf::Model;
use memory::host::HostAllocation;
use memory::manifest::{Allocation, Device, FileIdentity, HOST_DEVICE, LAYOUT_GGML, Manifest, TensorEntry};
use memory::memfd::{MemfdError, SealedMemfd};
use memory::pack::{PackError, PackPlan, Packing};

use super::checksum;
use super::read::{OpenFile, Progress, ReadError, Source, read_all};

/// What the weight-server asks for.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) generation: u64,
    pub(crate) model: String,
    /// Opened by the weight-server; the loader opens nothing.
    pub(crate) files: Vec<(FileIdentity, File)>,
    pub(crate) packing: Packing,
    pub(crate) layout: u32,
    pub(crate) device: String,
    pub(crate) threads: usize,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("{device} is no device of this build: only \"{HOST_DEVICE}\" is")]
    Device { device: String },
    #[error("layout {layout} is not known: the host has only layout {LAYOUT_GGML}")]
    Layout { layout: u32 },
    #[error(transparent)]
    Open(#[from] gguf::OpenError),
    #[error("{} is refused", path.display())]
    Model { path: PathBuf, source: gguf::ModelCheckError },
    #[error("{} cannot be placed in memory", path.display())]
    Pack { path: PathBuf, source: PackError },
    #[error("cannot inspect {}", path.display())]
    Inspect { path: PathBuf, source: io::Error },
    #[error("{} changed while it was being loaded: load it again when it is complete", path.display())]
    Changed { path: PathBuf },
    #[error("cannot allocate {bytes} bytes, {number} of {of}")]
    Allocate { bytes: u64, number: usize, of: usize, source: MemfdError },
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("cannot seal the loaded model")]
    Seal(#[source] MemfdError),
}

/// A job whose files have a valid header: what it takes is known, nothing is allocated yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    job: Job,
    model: Model,
    sources: Vec<Source>,
    pub(crate) plan: PackPlan,
}

/// All of a generation, sealed.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) manifest: SealedMemfd,
    pub(crate) allocations: Vec<SealedMemfd>,
}

impl Job {
    /// Validates the headers of all files and plans the memory.
    pub(crate) fn prepare(self) -> Result<Prepared, LoadError> {
        if self.device != HOST_DEVICE {
            return Err(LoadError::Device { device: self.device });
        }
        if self.layout != LAYOUT_GGML {
            return Err(LoadError::Layout { layout: self.layout });
        }
        self.check_unchanged()?;
        let first = self.files.first().map(|(identity, _)| identity.path.clone()).unwrap_or_default();
        let model = Model::open_with(&first, |path| self.open(path))?;
        gguf::check_model(model.metadata())
            .map_err(|source| LoadError::Model { path: first.clone(), source })?;
        let sources: Vec<Source> = model
            .tensors()
            .map(|(file, tensor)| Source {
                name: tensor.name.clone(),
                file,
                offset: model.files()[file].header.file_offset(tensor),
                bytes: tensor.bytes,
            })
            .collect();
        let sizes: Vec<u64> = sources.iter().map(|source| source.bytes).collect();
        let plan =
            PackPlan::new(&sizes, self.packing).map_err(|source| LoadError::Pack { path: first, source })?;
        Ok(Prepared { job: self, model, sources, plan })
    }

    /// The open file that has this path, from its start.
    fn open(&self, path: &std::path::Path) -> io::Result<(File, u64)> {
        let found = self.files.iter().find(|(identity, _)| identity.path == path);
        let (identity, file) = found.ok_or(io::ErrorKind::NotFound)?;
        let mut file = file.try_clone()?;
        file.seek(SeekFrom::Start(0))?;
        Ok((file, identity.bytes))
    }

    fn check_unchanged(&self) -> Result<(), LoadError> {
        for (identity, file) in &self.files {
            let path = || identity.path.clone();
            let metadata = file.metadata().map_err(|source| LoadError::Inspect { path: path(), source })?;
            if !FileIdentity::of(path(), &metadata).is_same_file(identity) {
                return Err(LoadError::Changed { path: path() });
            }
        }
        Ok(())
    }
}

impl Prepared {
    /// Bytes of the manifest, nearly: names and metadata dominate.
    pub(crate) fn manifest_bytes(&self) -> u64 {
        /// Numbers, checksums and tags of one tensor.
        const TENSOR_ENTRY_BYTES: u64 = 128;
        let names: u64 =
            self.sources.iter().map(|source| source.name.len() as u64 + TENSOR_ENTRY_BYTES).sum();
        self.model.metadata().bytes().len() as u64 + names
    }

    pub(crate) fn tensors(&self) -> usize {
        self.sources.len()
    }

    /// Allocates, reads, checks that the files are still the same, seals.
    pub(crate) fn load(self, progress: &Progress) -> Result<Loaded, LoadError> {
        let of = self.plan.allocations.len();
        let mut allocations = Vec::with_capacity(of);
        for (index, &bytes) in self.plan.allocations.iter().enumerate() {
            let allocation = HostAllocation::create("ballast-weights", bytes)
                .map_err(|source| LoadError::Allocate { bytes, number: index + 1, of, source })?;
            allocations.push(allocation);
        }
        let files: Vec<OpenFile> = self
            .job
            .files
            .iter()
            .map(|(identity, file)| {
                let path = identity.path.clone();
                match file.try_clone() {
                    Ok(file) => Ok(OpenFile { path, file }),
                    Err(source) => Err(LoadError::Inspect { path, source }),
                }
            })
            .collect::<Result<_, _>>()?;
        let pieces =
            read_all(&self.sources, &files, &self.plan, &mut allocations, self.job.threads, progress);
        // A file that shrank meanwhile reads as cut off; that it changed is the better answer.
        self.job.check_unchanged()?;
        let pieces = pieces?;
        let sealed = allocations.into_iter().map(HostAllocation::seal).collect::<Result<Vec<_>, _>>();
        let allocations = sealed.map_err(LoadError::Seal)?;
        let manifest = self.manifest(&allocations, &pieces).to_memfd().map_err(LoadError::Seal)?;
        Ok(Loaded { manifest, allocations })
    }

    fn manifest(&self, allocations: &[SealedMemfd], pieces: &[Vec<u128>]) -> Manifest {
        let tensors: Vec<TensorEntry> = self
            .model
            .tensors()
            .zip(&self.plan.placements)
            .zip(pieces)
            .map(|(((_, tensor), placement), pieces)| {
                let checksum = checksum::tensor(pieces);
                TensorEntry {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype.id(),
                    layout: self.job.layout,
                    shape: tensor.dims.clone(),
                    shard: None,
                    allocation: placement.allocation,
                    offset: placement.offset,
                    bytes: tensor.bytes,
                    raw_checksum: checksum,
                    // Layout 0 is the file's own.
                    checksum,
                }
            })
            .collect();
        let headers = self.model.files().iter().map(|file| &file.header.bytes()[..]);
        let digest = checksum::model(headers, tensors.iter().map(|tensor| tensor.raw_checksum));
        Manifest {
            model: self.job.model.clone(),
            digest,
            generation: self.job.generation,
            files: self.job.files.iter().map(|(identity, _)| identity.clone()).collect(),
            devices: vec![Device::host()],
            layout: self.job.layout,
            allocations: allocations
                .iter()
                .map(|memfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() })
                .collect(),
            tensors,
            gguf_metadata: self.model.metadata().bytes().clone(),
            created_unix_seconds: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }
}
