//! A load onto a GPU: several readers, one thread that gives their parts to the device in order.
//!
//! ```text
//! readers --> HostSlot (pinned) --> reorder --> ModelUpload --> sums
//!   ^                                         |
//!   +---------------- StagingRing <------------------+
//! ```
//! A reader takes a slot first and the next part second, so whoever has a part can bring it: the part that is due is never
//! behind others in want of a slot.
//!
//! The ring is there before the load: its pages are cleared while the driver starts, and pinned all at once. Readers begin
//! while the model is still being allocated.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use cuda::{Context, Device, DeviceSelector, DeviceUuid, HostPages, PinnedBuffer};
use kernels::cuda::loading::{
    self, EDGE_BYTES, HostSlot, ModelChecksums, ModelUpload, STAGING_BYTES, StagingRing, TensorDestination,
    TensorPart, ring_bytes,
};
use memory::device::{DeviceTensor, ImportedModel, WritableModel};
use memory::manifest::{self, DeviceKind, FileIdentity, Manifest};

use super::file_parts::FilePart;
use super::file_reader::{self, FileReader, reopen_direct};
use super::gpu_error::GpuLoadError;
use super::host_reader::{OpenModelFile, ReadProgress, TensorReadError};
use super::job::{FilledAllocations, LoadPlan};
use super::{CONTEXT_BYTES, PINNED_BYTES};

pub(super) use kernels::cuda::loading::PART_BYTES;

/// A process that was killed gives its memory back late; the driver takes up to seconds.
const ALLOCATION_RETRY_TIMEOUT: Duration = Duration::from_secs(10);

const _: () = assert!(file_reader::EDGE_BYTES == EDGE_BYTES);

/// A GPU with a context of this process.
pub(super) struct GpuContext {
    context: Context,
}

/// A GPU that a model is to be loaded onto.
pub(super) struct GpuLoadTarget {
    ring: StagingRing,
    pinned_bytes: u64,
    /// The model's files, to be read around the page cache; those that can.
    direct: Vec<Option<File>>,
    gpu: GpuContext,
}

type ReadResult = Result<(usize, HostSlot, TensorPart), GpuLoadError>;

impl GpuContext {
    /// Loads the driver and makes the context: devices are opened, threads started, so this comes before the sandbox.
    pub(super) fn open(uuid: DeviceUuid) -> Result<Self, GpuLoadError> {
        let driver = cuda::open_driver()?;
        let device = Device::open(driver, DeviceSelector::Uuid(uuid))?;
        Ok(Self { context: device.context()? })
    }

    pub(super) fn import(
        &self,
        manifest: &Manifest,
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<DeviceTensor>, GpuLoadError> {
        Ok(ImportedModel::import(self.context.device(), manifest, fds)?.tensors)
    }

    /// Checksums of the chunks of each tensor, as they are now.
    pub(super) fn sums(&self, tensors: &[DeviceTensor]) -> Result<Vec<Vec<u128>>, GpuLoadError> {
        Ok(loading::verify(self.context.device(), tensors)?)
    }
}

impl GpuLoadTarget {
    /// Besides, it opens the files a second time, which the sandbox would not let it.
    pub(super) fn open(uuid: DeviceUuid, files: &[(FileIdentity, File)]) -> Result<Self, GpuLoadError> {
        let started = Instant::now();
        let bytes = files.iter().fold(0u64, |sum, (identity, _)| sum.saturating_add(identity.bytes));
        let (pages, gpu) = std::thread::scope(|scope| {
            let pages = scope.spawn(|| HostPages::new(ring_bytes(bytes)));
            let gpu = GpuContext::open(uuid);
            (pages.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), gpu)
        });
        let gpu = gpu?;
        let driver = started.elapsed();
        debug_assert!(ring_bytes(bytes) as u64 <= PINNED_BYTES, "was reserved");
        let pinned = PinnedBuffer::pin(gpu.context.device(), pages.map_err(GpuLoadError::Pages)?)?;
        let ring = StagingRing::new(gpu.context.device(), pinned)?;
        tracing::info!(
            driver_ms = driver.as_millis() as u64,
            pin_ms = (started.elapsed() - driver).as_millis() as u64,
            "opened the GPU"
        );
        let direct = files.iter().map(|(_, file)| reopen_direct(file)).collect();
        Ok(Self { ring, pinned_bytes: ring_bytes(bytes) as u64, direct, gpu })
    }

    pub(super) fn entry(&self) -> manifest::ManifestDevice {
        let facts = self.gpu.context.device().info();
        manifest::ManifestDevice {
            kind: DeviceKind::Cuda,
            id: facts.uuid.to_string(),
            compute_capability: facts.compute_capability,
        }
    }

    pub(super) fn allocated_bytes(&self, bytes: u64) -> Option<u64> {
        self.gpu.context.device().allocated_bytes(bytes)
    }

    /// What a load takes until it is done, of the device beside the model and of the host.
    pub(super) fn needs(&self, plan: &LoadPlan) -> (u64, u64) {
        let staging = CONTEXT_BYTES + STAGING_BYTES;
        let shared = if self.gpu.context.device().info().integrated {
            plan.pack.allocation_bytes().saturating_add(staging)
        } else {
            0
        };
        (staging, self.pinned_bytes.saturating_add(shared))
    }

    /// Allocates the model, fills it, exports it.
    pub(super) fn fill(
        &self,
        plan: &LoadPlan,
        files: Vec<OpenModelFile>,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<FilledAllocations<OwnedFd>, GpuLoadError> {
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
            let taken = self.receive_parts(plan, &arrivals, progress, started);
            // Whoever waits for a slot has no more to do, or nobody to bring it to.
            self.ring.close();
            taken
        })
    }

    /// What the readers bring becomes a model.
    fn receive_parts(
        &self,
        plan: &LoadPlan,
        arrivals: &Receiver<ReadResult>,
        progress: &ReadProgress,
        started: Instant,
    ) -> Result<FilledAllocations<OwnedFd>, GpuLoadError> {
        let GpuContext { context } = &self.gpu;
        let mut model = WritableModel::allocate(context, &plan.pack.allocations, ALLOCATION_RETRY_TIMEOUT)?;
        let destinations: Vec<TensorDestination> = plan
            .pack
            .placements
            .iter()
            .zip(&plan.tiles)
            .map(|(place, tiles)| TensorDestination {
                allocation: place.allocation,
                offset: place.offset,
                tiles: *tiles,
            })
            .collect();
        let mut upload = ModelUpload::new(context.device(), &self.ring, &mut model, &destinations)?;
        let allocated = started.elapsed();
        submit_all(&mut upload, plan, arrivals, progress)?;
        let read = started.elapsed();
        let ModelChecksums { raw, laid_out } = upload.finish()?;
        let allocations = model.finish()?;
        let bytes: u64 = plan.sources.iter().map(|source| source.bytes).sum();
        tracing::info!(
            bytes,
            allocate_ms = allocated.as_millis() as u64,
            read_ms = (read - allocated).as_millis() as u64,
            finish_ms = (started.elapsed() - read).as_millis() as u64,
            // Of reading and copying, from the first byte to the last.
            gigabytes_per_second = bytes as f64 / read.as_secs_f64() / 1e9,
            "filled the GPU's memory"
        );
        Ok(FilledAllocations { allocations, raw, laid_out })
    }

    fn direct_file(&self, index: usize) -> Option<File> {
        self.direct.get(index)?.as_ref()?.try_clone().ok()
    }

    /// Body of a reader.
    fn read(
        &self,
        plan: &LoadPlan,
        readers: &[FileReader],
        next: &AtomicUsize,
        progress: &ReadProgress,
        filled: &Sender<ReadResult>,
    ) {
        // Whoever receives stops at the first failure: a second one has nobody to go to.
        if let Err(error) = self.gpu.context.bind() {
            let _ = filled.send(Err(error.into()));
            return;
        }
        while !progress.cancelled.load(Ordering::Relaxed) {
            let arrival = match self.ring.take() {
                Ok(Some(slot)) => {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(part) = plan.parts.get(index) else { return };
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

/// Gives all parts to the device in their order, whatever the order in which they arrive.
fn submit_all(
    upload: &mut ModelUpload<'_>,
    plan: &LoadPlan,
    arrivals: &Receiver<ReadResult>,
    progress: &ReadProgress,
) -> Result<(), GpuLoadError> {
    let mut early = BTreeMap::new();
    for due in 0..plan.parts.len() {
        let (slot, part) = loop {
            if let Some(found) = early.remove(&due) {
                break found;
            }
            // Readers that are gone without a word were told to stop.
            let (index, slot, part) =
                arrivals.recv().unwrap_or(Err(GpuLoadError::Read(TensorReadError::Cancelled)))?;
            early.insert(index, (slot, part));
        };
        upload.submit(slot, part)?;
        progress.done_bytes.fetch_add(part.bytes as u64, Ordering::Relaxed);
    }
    Ok(())
}
