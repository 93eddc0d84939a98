// SPDX-License-Identifier: Apache-2.0

//! Loads a model onto a GPU: several threads read the files, one thread submits to the device.
//!
//! ```text
//! reader threads --> HostSlot (pinned) --> reorder --> ModelUpload --> checksums
//!       ^                                                  |
//!       '------------------ StagingRing <------------------'
//! ```
//! A reader takes a slot first and the next part second. A reader with a part can therefore always
//! deliver it, and the part that is due never waits for a slot.
//!
//! The ring exists before the load: its pages are cleared while the driver starts, and are pinned
//! together. The readers start while the model is still being allocated.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use cuda::{Context, Device, DeviceInfo, DeviceSelector, DeviceUuid, DriverApi, HostPages, PinnedBuffer};
use gguf::GgufModel;
use kernels::cuda::loading::{
    self, EDGE_BYTES, HostSlot, ModelChecksums, ModelUpload, PART_BYTES, StagingRing, TensorDestination,
    TensorPart, ring_bytes,
};
use memory::device::{COPY_PINNED_BYTES, ImportedModel, WritableModel};
use memory::manifest::{Allocation, DeviceKind, FileIdentity, Manifest, ManifestDevice};
use memory::pack::PackPlan;
use quant::layout::{LAYOUT_TILES, Tiles};

use super::file_parts::{FilePart, split_into_parts};
use super::file_reader::{self, FileReader, reopen_direct};
use super::gpu_error::GpuLoadError;
use crate::loader::copy::SourceGeneration;
use crate::loader::host_reader::{OpenModelFile, ReadProgress, TensorReadError, TensorSource};
use crate::loader::load_error::ModelLoadError;
use crate::loader::memory_bounds::{CONTEXT_BYTES, PINNED_BYTES};
use crate::loader::sandbox::SandboxProfile;
use crate::loader::target::{CopiedAllocations, FilledAllocations, LoadOverhead, LoadPlan, LoadTarget};

/// The driver takes up to seconds to release the memory of a process that was killed.
pub(super) const ALLOCATION_RETRY_TIMEOUT: Duration = Duration::from_secs(10);

const _: () = assert!(file_reader::EDGE_BYTES == EDGE_BYTES);

/// A GPU that a model is loaded onto.
pub(super) struct GpuTarget {
    pub(super) driver: Arc<dyn DriverApi>,
    pub(super) context: Context,
    /// The other GPUs whose memory this one can access.
    peers: Vec<DeviceUuid>,
    ring: StagingRing,
    pinned_bytes: u64,
    /// The model's files, opened for direct reads if the file system supports them.
    direct: Vec<Option<File>>,
    /// How each tensor is laid out.
    pub(super) tiles: Vec<Tiles>,
    /// The parts in which tensors are transferred, in file order.
    parts: Vec<FilePart>,
}

type ReadResult = Result<(usize, HostSlot, TensorPart), GpuLoadError>;

/// Loads the driver and creates a context. The driver opens devices and starts threads, so this
/// comes before the sandbox.
pub(super) fn open_context(uuid: DeviceUuid) -> Result<Context, GpuLoadError> {
    open_context_with(cuda::open_driver()?, uuid)
}

fn open_context_with(driver: Arc<dyn DriverApi>, uuid: DeviceUuid) -> Result<Context, GpuLoadError> {
    let device = Device::open(driver, DeviceSelector::Uuid(uuid))?;
    Ok(device.context()?)
}

/// Imports a generation read-only and computes the checksums of each tensor's chunks.
pub(super) fn compute_checksums(
    context: &Context,
    manifest: &Manifest,
    fds: Vec<OwnedFd>,
) -> Result<Vec<Vec<u128>>, GpuLoadError> {
    let tensors = ImportedModel::import(context.device(), manifest, &fds)?.tensors;
    Ok(loading::verify(context.device(), &tensors)?)
}

impl LoadTarget for GpuTarget {
    fn device(&self) -> ManifestDevice {
        let info = self.context.device().info();
        ManifestDevice {
            kind: DeviceKind::Cuda,
            id: info.uuid.to_string(),
            compute_capability: info.compute_capability,
        }
    }

    fn layout(&self) -> u32 {
        LAYOUT_TILES
    }

    fn peer_devices(&self) -> Vec<String> {
        self.peers.iter().map(DeviceUuid::to_string).collect()
    }

    fn sandbox_profile(&self) -> SandboxProfile {
        SandboxProfile::Gpu
    }

    fn tensor_sizes(&mut self, model: &GgufModel) -> Result<Vec<u64>, ModelLoadError> {
        let tiles: Result<_, GpuLoadError> = model.tensors().map(|(_, tensor)| tile_layout(tensor)).collect();
        self.tiles = tiles?;
        Ok(self.tiles.iter().map(|tiles| tiles.bytes() as u64).collect())
    }

    fn finish_plan(&mut self, sources: &[TensorSource], pack: &mut PackPlan) -> Result<(), ModelLoadError> {
        for bytes in &mut pack.allocations {
            let rounded = self.context.device().allocated_bytes(*bytes);
            *bytes = rounded.ok_or(GpuLoadError::TooLarge { bytes: *bytes })?;
        }
        let parts = split_into_parts(sources, &self.tiles, PART_BYTES);
        self.parts = parts.map_err(GpuLoadError::from)?;
        Ok(())
    }

    fn overhead(&self, plan: &LoadPlan) -> LoadOverhead {
        let staging = CONTEXT_BYTES + self.ring.staging_bytes();
        let shared = if self.context.device().info().integrated {
            plan.pack.allocation_bytes().saturating_add(staging)
        } else {
            0
        };
        let pinned = self.pinned_bytes + COPY_PINNED_BYTES;
        LoadOverhead { device_bytes: staging, host_bytes: pinned.saturating_add(shared) }
    }

    fn fill(
        &self,
        plan: &LoadPlan,
        files: Vec<OpenModelFile>,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<FilledAllocations, ModelLoadError> {
        let started = Instant::now();
        let readers: Vec<FileReader> = files
            .into_iter()
            .enumerate()
            .map(|(index, open)| FileReader { open, direct: self.direct_file(index) })
            .collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (filled, arrivals) = mpsc::channel();
            for _ in 0..threads.max(1) {
                let (filled, readers, next) = (filled.clone(), &readers, &next);
                scope.spawn(move || self.read(plan, readers, next, progress, &filled));
            }
            drop(filled);
            let filled_allocations = self.receive_parts(plan, &arrivals, progress, started);
            // A reader that still waits for a slot has no part left, or no receiver.
            self.ring.close();
            Ok(filled_allocations?)
        })
    }

    fn copy(
        &self,
        plan: &LoadPlan,
        source: &SourceGeneration,
        _: usize,
        progress: &ReadProgress,
    ) -> Result<CopiedAllocations, ModelLoadError> {
        let copied = self.copy_from(plan, source)?;
        progress.done_bytes.store(plan.pack.tensor_bytes, Ordering::Relaxed);
        Ok(copied)
    }
}

impl GpuTarget {
    /// Creates the context and pins the staging ring. Also opens the files a second time for direct
    /// reads, which the sandbox would refuse later.
    pub(super) fn open(
        uuid: DeviceUuid,
        unified_memory: bool,
        files: &[(FileIdentity, File)],
    ) -> Result<Self, GpuLoadError> {
        let started = Instant::now();
        let bytes = files.iter().fold(0u64, |sum, (identity, _)| sum.saturating_add(identity.bytes));
        let (pages, opened) = std::thread::scope(|scope| {
            let pages = scope.spawn(|| HostPages::new(ring_bytes(bytes)));
            let open = || {
                let driver = cuda::open_driver()?;
                Ok::<_, GpuLoadError>((driver.clone(), open_context_with(driver, uuid)?))
            };
            let opened = open();
            (pages.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), opened)
        });
        let (driver, context) = opened?;
        check_memory(context.device().info(), unified_memory)?;
        let driver_time = started.elapsed();
        let pinned_bytes = ring_bytes(bytes) as u64;
        debug_assert!(
            pinned_bytes + COPY_PINNED_BYTES <= PINNED_BYTES,
            "invariant: the ring fits the ledger's reservation"
        );
        let pinned = PinnedBuffer::pin(context.device(), pages.map_err(GpuLoadError::Pages)?)?;
        let ring = StagingRing::new(context.device(), pinned)?;
        tracing::info!(
            driver_ms = driver_time.as_millis() as u64,
            pin_ms = (started.elapsed() - driver_time).as_millis() as u64,
            "opened the GPU"
        );
        let direct = files.iter().map(|(_, file)| reopen_direct(file)).collect();
        let peers = context.device().peers().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot tell which GPUs this one can access: copies go through the host");
            Vec::new()
        });
        Ok(Self { driver, context, peers, ring, pinned_bytes, direct, tiles: Vec::new(), parts: Vec::new() })
    }

    /// Uploads the parts that the readers deliver.
    fn receive_parts(
        &self,
        plan: &LoadPlan,
        arrivals: &Receiver<ReadResult>,
        progress: &ReadProgress,
        started: Instant,
    ) -> Result<FilledAllocations, GpuLoadError> {
        let context = &self.context;
        let mut model = WritableModel::allocate(context, &plan.pack.allocations, ALLOCATION_RETRY_TIMEOUT)?;
        let destinations: Vec<TensorDestination> = plan
            .pack
            .placements
            .iter()
            .zip(&self.tiles)
            .map(|(place, tiles)| TensorDestination {
                allocation: place.allocation,
                offset: place.offset,
                tiles: *tiles,
            })
            .collect();
        let mut upload = ModelUpload::new(context.device(), &self.ring, &mut model, &destinations)?;
        let allocated = started.elapsed();
        submit_all(&mut upload, &self.parts, arrivals, progress)?;
        let read = started.elapsed();
        let ModelChecksums { raw, laid_out } = upload.finish()?;
        let fds = model.finish()?;
        let bytes: u64 = plan.sources.iter().map(|source| source.bytes).sum();
        tracing::info!(
            bytes,
            allocate_ms = allocated.as_millis() as u64,
            read_ms = (read - allocated).as_millis() as u64,
            finish_ms = (started.elapsed() - read).as_millis() as u64,
            // The rate of reading and copying, from the first byte to the last.
            gigabytes_per_second = bytes as f64 / read.as_secs_f64() / 1e9,
            "filled the GPU's memory"
        );
        let entry = |&bytes: &u64| Allocation { device: 0, bytes, inode: 0 };
        let entries = plan.pack.allocations.iter().map(entry).collect();
        Ok(FilledAllocations { fds, entries, raw, laid_out })
    }

    fn direct_file(&self, index: usize) -> Option<File> {
        self.direct.get(index)?.as_ref()?.try_clone().ok()
    }

    /// The body of a reader thread.
    fn read(
        &self,
        plan: &LoadPlan,
        readers: &[FileReader],
        next: &AtomicUsize,
        progress: &ReadProgress,
        filled: &Sender<ReadResult>,
    ) {
        // The receiver stops at the first failure, so later ones are dropped.
        if let Err(error) = self.context.bind() {
            let _ = filled.send(Err(error.into()));
            return;
        }
        while !progress.cancelled.load(Ordering::Relaxed) {
            let arrival = match self.ring.take() {
                Ok(Some(slot)) => {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(part) = self.parts.get(index) else { return };
                    read_part(plan, &readers[part.file], part, slot).map(|(slot, part)| (index, slot, part))
                }
                Ok(None) => return,
                Err(error) => Err(error.into()),
            };
            let failed = arrival.is_err();
            if filled.send(arrival).is_err() || failed {
                return;
            }
        }
    }
}

/// The ledger counts the load on the device's own budget or on the host's, and must count right.
fn check_memory(info: &DeviceInfo, counts_on_host: bool) -> Result<(), GpuLoadError> {
    match (info.integrated, counts_on_host) {
        (true, false) => Err(GpuLoadError::UnifiedMemory),
        (false, true) => Err(GpuLoadError::OwnMemory),
        _ => Ok(()),
    }
}

fn read_part(
    plan: &LoadPlan,
    reader: &FileReader,
    part: &FilePart,
    mut slot: HostSlot,
) -> Result<(HostSlot, TensorPart), GpuLoadError> {
    let at = reader.read(&plan.sources[part.tensor], part, slot.bytes_mut())?;
    let FilePart { tensor, start, bytes, .. } = *part;
    Ok((slot, TensorPart { tensor, start, bytes, at }))
}

/// Submits all parts to the device in file order, in whatever order they arrive.
fn submit_all(
    upload: &mut ModelUpload<'_>,
    parts: &[FilePart],
    arrivals: &Receiver<ReadResult>,
    progress: &ReadProgress,
) -> Result<(), GpuLoadError> {
    let mut early = BTreeMap::new();
    for due in 0..parts.len() {
        let (slot, part) = loop {
            if let Some(found) = early.remove(&due) {
                break found;
            }
            // Readers that ended without an error were cancelled.
            let (index, slot, part) =
                arrivals.recv().unwrap_or(Err(GpuLoadError::Read(TensorReadError::Cancelled)))?;
            early.insert(index, (slot, part));
        };
        upload.submit(slot, part)?;
        progress.done_bytes.fetch_add(part.bytes as u64, Ordering::Relaxed);
    }
    Ok(())
}

fn tile_layout(tensor: &gguf::TensorInfo) -> Result<Tiles, GpuLoadError> {
    let refused = |source| GpuLoadError::Tiles { tensor: tensor.name.clone(), source };
    let cols = tensor.dims.first().copied().unwrap_or(1);
    let rows = tensor.dims.iter().skip(1).try_fold(1u64, |rows, dim| rows.checked_mul(*dim));
    let fits = |number: u64| usize::try_from(number).ok();
    let (Some(cols), Some(rows)) = (fits(cols), rows.and_then(fits)) else {
        return Err(GpuLoadError::TooLarge { bytes: tensor.bytes });
    };
    Tiles::new(tensor.dtype, cols, rows).map_err(refused)
}
