//! One load from open files to filled allocations and their manifest. No sockets: those are in `mod.rs`.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use gguf::GgufModel;
use handoff::manifest::seal_manifest;
use memory::host::HostAllocation;
use memory::manifest::{Allocation, FileIdentity, Manifest, ManifestDevice, TensorEntry};
use memory::memfd::{MemfdError, SealedMemfd};
use memory::pack::{PackError, PackPlan, Packing};
use quant::layout::{LayoutError, Tiles};

use super::checksum;
use super::file_parts::{FilePart, RowsTooLong, split_into_parts};
use super::gpu::PART_BYTES;
use super::gpu_error::GpuLoadError;
use super::host_reader::{OpenModelFile, ReadProgress, TensorReadError, TensorSource, read_all};
use super::target::{LoadTarget, LoadTargetError};

/// What the weight-server asks for.
pub(crate) struct LoaderJob {
    pub(crate) generation: u64,
    pub(crate) model: String,
    /// Opened by the weight-server; the loader opens nothing.
    pub(crate) files: Vec<(FileIdentity, File)>,
    pub(crate) packing: Packing,
    pub(crate) place: LoadTarget,
    pub(crate) threads: usize,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ModelLoadError {
    #[error("tensor {tensor} cannot be laid out for a GPU: load the model on the host")]
    Tiles { tensor: String, source: LayoutError },
    #[error("the model cannot be brought to a GPU: load it on the host")]
    Rows(#[from] RowsTooLong),
    #[error("an allocation of {bytes} bytes is larger than any memory")]
    TooLarge { bytes: u64 },
    #[error(transparent)]
    Target(#[from] LoadTargetError),
    #[error(transparent)]
    Gpu(#[from] GpuLoadError),
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
    Read(#[from] TensorReadError),
    #[error("cannot seal the loaded model")]
    Seal(#[source] MemfdError),
}

/// A job whose files have a valid header: what it takes is known, nothing is allocated yet.
pub(crate) struct PreparedLoad {
    job: LoaderJob,
    model: GgufModel,
    pub(crate) plan: LoadPlan,
}

/// What stands where, in the files and in memory.
pub(crate) struct LoadPlan {
    pub(crate) sources: Vec<TensorSource>,
    pub(crate) pack: PackPlan,
    /// On a GPU: how each tensor is laid out, and the parts in which they travel.
    pub(crate) tiles: Vec<Tiles>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without CUDA nothing travels"))]
    pub(crate) parts: Vec<FilePart>,
}

/// Memory that holds the model, and what its bytes are: checksums of each tensor's chunks, in the file and in memory.
pub(crate) struct FilledAllocations<A> {
    pub(crate) allocations: Vec<A>,
    pub(crate) raw: Vec<Vec<u128>>,
    pub(crate) laid_out: Vec<Vec<u128>>,
}

/// All of a generation: nobody can change it any more.
#[derive(Debug)]
pub(crate) struct LoadedModel {
    pub(crate) manifest: SealedMemfd,
    pub(crate) allocations: Vec<OwnedFd>,
}

impl LoaderJob {
    /// Validates the headers of all files and plans the memory.
    pub(crate) fn prepare(self) -> Result<PreparedLoad, ModelLoadError> {
        self.check_unchanged()?;
        let first = self.files.first().map(|(identity, _)| identity.path.clone()).unwrap_or_default();
        let model = GgufModel::open_with(&first, |path| self.open(path))?;
        gguf::check_model(model.metadata())
            .map_err(|source| ModelLoadError::Model { path: first.clone(), source })?;
        let sources: Vec<TensorSource> = model
            .tensors()
            .map(|(file, tensor)| TensorSource {
                name: tensor.name.clone(),
                file,
                offset: model.files()[file].header.file_offset(tensor),
                bytes: tensor.bytes,
            })
            .collect();
        let tiles = match &self.place {
            LoadTarget::Host => Vec::new(),
            LoadTarget::Gpu(_) => {
                model.tensors().map(|(_, tensor)| tiles(tensor)).collect::<Result<_, _>>()?
            }
        };
        let sizes: Vec<u64> = match &self.place {
            LoadTarget::Host => sources.iter().map(|source| source.bytes).collect(),
            LoadTarget::Gpu(_) => tiles.iter().map(|tiles| tiles.bytes() as u64).collect(),
        };
        let mut pack = PackPlan::new(&sizes, self.packing)
            .map_err(|source| ModelLoadError::Pack { path: first, source })?;
        let mut parts = Vec::new();
        if let LoadTarget::Gpu(gpu) = &self.place {
            for bytes in &mut pack.allocations {
                *bytes = gpu.allocated_bytes(*bytes).ok_or(ModelLoadError::TooLarge { bytes: *bytes })?;
            }
            parts = split_into_parts(&sources, &tiles, PART_BYTES)?;
        }
        Ok(PreparedLoad { job: self, model, plan: LoadPlan { sources, pack, tiles, parts } })
    }

    /// The open file that has this path, from its start.
    fn open(&self, path: &std::path::Path) -> io::Result<(File, u64)> {
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
    /// Bytes of the manifest, nearly: names and metadata dominate.
    pub(crate) fn manifest_bytes(&self) -> u64 {
        /// Numbers, checksums and tags of one tensor.
        const TENSOR_ENTRY_BYTES: u64 = 128;
        let names: u64 =
            self.plan.sources.iter().map(|source| source.name.len() as u64 + TENSOR_ENTRY_BYTES).sum();
        self.model.metadata().bytes().len() as u64 + names
    }

    /// What the load takes until it is done: of the device beside the allocations, and of the host.
    pub(crate) fn needs(&self) -> (u64, u64) {
        match &self.job.place {
            LoadTarget::Host => (0, self.plan.pack.allocation_bytes()),
            LoadTarget::Gpu(gpu) => gpu.needs(&self.plan),
        }
    }

    /// Allocates, reads, checks that the files are still the same, ends writing.
    pub(crate) fn load(&self, progress: &ReadProgress) -> Result<LoadedModel, ModelLoadError> {
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
        match &self.job.place {
            LoadTarget::Host => {
                let filled = self.fill_host(&files, progress);
                // A file that shrank meanwhile reads as cut off; that it changed is the better answer.
                self.job.check_unchanged()?;
                let FilledAllocations { allocations, raw, laid_out } = filled?;
                let sealed = allocations.into_iter().map(HostAllocation::seal).collect::<Result<Vec<_>, _>>();
                let sealed = sealed.map_err(ModelLoadError::Seal)?;
                let entry = |memfd: &SealedMemfd| Allocation {
                    device: 0,
                    bytes: memfd.bytes(),
                    inode: memfd.inode(),
                };
                let entries = sealed.iter().map(entry).collect();
                let manifest = self.manifest(ManifestDevice::host(), entries, &raw, &laid_out);
                let allocations = sealed.into_iter().map(OwnedFd::from).collect();
                Ok(LoadedModel {
                    manifest: seal_manifest(&manifest).map_err(ModelLoadError::Seal)?,
                    allocations,
                })
            }
            LoadTarget::Gpu(gpu) => {
                let filled = gpu.fill(&self.plan, files, self.job.threads, progress);
                self.job.check_unchanged()?;
                let FilledAllocations { allocations, raw, laid_out } = filled?;
                let entry = |&bytes: &u64| Allocation { device: 0, bytes, inode: 0 };
                let entries = self.plan.pack.allocations.iter().map(entry).collect();
                let manifest = self.manifest(gpu.entry(), entries, &raw, &laid_out);
                Ok(LoadedModel {
                    manifest: seal_manifest(&manifest).map_err(ModelLoadError::Seal)?,
                    allocations,
                })
            }
        }
    }

    fn fill_host(
        &self,
        files: &[OpenModelFile],
        progress: &ReadProgress,
    ) -> Result<FilledAllocations<HostAllocation>, ModelLoadError> {
        let LoadPlan { sources, pack, .. } = &self.plan;
        let of = pack.allocations.len();
        let mut allocations = Vec::with_capacity(of);
        for (index, &bytes) in pack.allocations.iter().enumerate() {
            let allocation = HostAllocation::create("ballast-weights", bytes)
                .map_err(|source| ModelLoadError::Allocate { bytes, number: index + 1, of, source })?;
            allocations.push(allocation);
        }
        let raw = read_all(sources, files, pack, &mut allocations, self.job.threads, progress)?;
        // Layout 0 is the file's own.
        Ok(FilledAllocations { allocations, laid_out: raw.clone(), raw })
    }

    fn manifest(
        &self,
        device: ManifestDevice,
        allocations: Vec<Allocation>,
        raw: &[Vec<u128>],
        laid_out: &[Vec<u128>],
    ) -> Manifest {
        let layout = self.job.place.layout();
        let tensors: Vec<TensorEntry> = self
            .model
            .tensors()
            .zip(&self.plan.pack.placements)
            .zip(raw.iter().zip(laid_out))
            .enumerate()
            .map(|(index, (((_, tensor), placement), (raw, laid_out)))| TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype.id(),
                layout,
                shape: tensor.dims.clone(),
                shard: None,
                allocation: placement.allocation,
                offset: placement.offset,
                bytes: self.plan.tiles.get(index).map_or(tensor.bytes, |tiles| tiles.bytes() as u64),
                raw_checksum: checksum::tensor(raw),
                checksum: checksum::tensor(laid_out),
            })
            .collect();
        let headers = self.model.files().iter().map(|file| &file.header.bytes()[..]);
        let digest = checksum::model(headers, tensors.iter().map(|tensor| tensor.raw_checksum));
        Manifest {
            model: self.job.model.clone(),
            digest,
            generation: self.job.generation,
            files: self.job.files.iter().map(|(identity, _)| identity.clone()).collect(),
            devices: vec![device],
            layout,
            allocations,
            tensors,
            gguf_metadata: self.model.metadata().bytes().clone(),
            created_unix_seconds: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }
}

fn tiles(tensor: &gguf::TensorInfo) -> Result<Tiles, ModelLoadError> {
    let refused = |source| ModelLoadError::Tiles { tensor: tensor.name.clone(), source };
    let cols = tensor.dims.first().copied().unwrap_or(1);
    let rows = tensor.dims.iter().skip(1).try_fold(1u64, |rows, dim| rows.checked_mul(*dim));
    let fits = |number: u64| usize::try_from(number).ok();
    let (Some(cols), Some(rows)) = (fits(cols), rows.and_then(fits)) else {
        return Err(ModelLoadError::TooLarge { bytes: tensor.bytes });
    };
    Tiles::new(tensor.dtype, cols, rows).map_err(refused)
}
