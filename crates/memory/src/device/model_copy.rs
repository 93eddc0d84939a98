// SPDX-License-Identifier: Apache-2.0

//! [`CopySource`]: a model on one GPU, mapped so that it can be copied to another GPU.
//!
//! ```text
//! peer    source memory ------------------------------------> target memory
//! host    source memory --> pinned buffers of the host -----> target memory
//! ```
//! The peer route needs no context on the source. The driver copies over NVLink or PCIe. The host
//! route is for GPUs that cannot access each other: it needs a context on both.

use std::os::fd::OwnedFd;

use cuda::{Context, CudaError, Device, DriverError, Event, PinError, PinnedBuffer, Stream};

use super::{ImportModelError, ImportedModel, WritableModel};
use crate::manifest::Manifest;

/// Bytes of one of the two buffers of the host route. One is filled while the other is emptied.
const BUFFER_BYTES: usize = 8 << 20;

/// Host memory that the host route pins.
pub const COPY_PINNED_BYTES: u64 = 2 * BUFFER_BYTES as u64;

/// How bytes get from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyRoute {
    /// The target maps the source's memory.
    Peer,
    /// Through pinned buffers of the host.
    Host,
}

/// Where a tensor lies in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPlace {
    pub allocation: usize,
    pub offset: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum CopyModelError {
    #[error("cannot tell whether one GPU can access the other")]
    Route(#[source] DriverError),
    #[error("cannot create a context on the GPU that has the model")]
    SourceContext(#[source] DriverError),
    #[error("cannot create a context on the GPU that the model is copied to")]
    TargetContext(#[source] DriverError),
    #[error("cannot map the model on the other GPU")]
    Import(#[from] ImportModelError),
    #[error("{count} places were given for {tensors} tensors")]
    Count { count: usize, tensors: usize },
    #[error("tensor {tensor} of {bytes} bytes does not fit its place")]
    Place { tensor: String, bytes: u64 },
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error("the copy between the GPUs failed")]
    Copy(#[from] CudaError),
}

/// A model on another GPU, mapped read-only. It is a copy's source as long as this value lives.
#[derive(Debug)]
pub struct CopySource {
    model: ImportedModel,
    /// The context that reads the source, if the target cannot.
    reader: Option<Context>,
}

/// A part of the model that one driver call copies.
#[derive(Debug, Clone, Copy)]
struct CopyPart {
    source: u64,
    target: u64,
    bytes: u64,
}

impl CopyRoute {
    /// The fastest route that the machine has.
    pub fn between(source: &Device, target: &Device) -> Result<Self, CopyModelError> {
        let can_access = target.can_access(source).map_err(CopyModelError::Route)?;
        Ok(if can_access { Self::Peer } else { Self::Host })
    }
}

impl CopySource {
    /// Maps the model that `manifest` describes. It lies on `source`.
    pub fn import(
        source: &Device,
        target: &Device,
        route: CopyRoute,
        manifest: &Manifest,
        fds: &[OwnedFd],
    ) -> Result<Self, CopyModelError> {
        let (reader, device) = match route {
            CopyRoute::Peer => (None, target),
            CopyRoute::Host => (Some(source.context().map_err(CopyModelError::SourceContext)?), source),
        };
        Ok(Self { model: ImportedModel::import_for(source, device, manifest, fds)?, reader })
    }

    /// Copies every tensor to its place and returns when the copy is complete. `places` has the
    /// order of the manifest.
    pub fn copy_to(
        &self,
        context: &Context,
        target: &mut WritableModel,
        places: &[TensorPlace],
    ) -> Result<(), CopyModelError> {
        let parts = self.parts(target, places)?;
        let copied = match &self.reader {
            None => copy_from_peer(context, &parts),
            Some(reader) => copy_through_host(reader, context, &parts),
        };
        if copied.is_err() {
            // The caller may free the target, so no copy may still write to it. If waiting fails,
            // the context is gone.
            let _ = context.synchronize();
        }
        copied
    }

    fn parts(&self, target: &WritableModel, places: &[TensorPlace]) -> Result<Vec<CopyPart>, CopyModelError> {
        let tensors = &self.model.tensors;
        if places.len() != tensors.len() {
            return Err(CopyModelError::Count { count: places.len(), tensors: tensors.len() });
        }
        let part = |(tensor, place): (&super::DeviceTensor, &TensorPlace)| {
            let end = place.offset.checked_add(tensor.bytes);
            match (target.addresses().get(place.allocation), end, target.bytes(place.allocation)) {
                (Some(start), Some(end), Some(size)) if end <= size => Ok(CopyPart {
                    source: tensor.address(),
                    target: start + place.offset,
                    bytes: tensor.bytes,
                }),
                _ => Err(CopyModelError::Place { tensor: tensor.name.clone(), bytes: tensor.bytes }),
            }
        };
        let parts: Result<Vec<CopyPart>, _> = tensors.iter().zip(places).map(part).collect();
        Ok(parts?.into_iter().filter(|part| part.bytes > 0).collect())
    }
}

fn copy_from_peer(context: &Context, parts: &[CopyPart]) -> Result<(), CopyModelError> {
    context.bind().map_err(CopyModelError::TargetContext)?;
    let stream = Stream::new(context.device())?;
    for part in parts {
        // SAFETY: the source is mapped as long as `CopySource` lives, the target is inside of its
        // allocation, and `copy_to` returns after the work has ended. Different models do not
        // overlap.
        unsafe { stream.enqueue_copy_on_device(part.target, part.source, part.bytes as usize) }?;
    }
    Ok(stream.synchronize()?)
}

fn copy_through_host(reader: &Context, writer: &Context, parts: &[CopyPart]) -> Result<(), CopyModelError> {
    let bind_writer = || writer.bind().map_err(CopyModelError::TargetContext);
    bind_writer()?;
    let device = writer.device();
    let new_buffer = || PinnedBuffer::<u8>::new(device, BUFFER_BYTES);
    let mut buffers = [new_buffer()?, new_buffer()?];
    let emptied = [Event::new(device)?, Event::new(device)?];
    let writes = Stream::new(device)?;
    let reads = Stream::new(reader.device())?;
    for (index, part) in parts.iter().flat_map(split_part).enumerate() {
        let slot = index % buffers.len();
        if index >= buffers.len() {
            emptied[slot].synchronize()?;
        }
        let buffer = &mut buffers[slot].as_mut_slice()[..part.bytes as usize];
        reader.bind().map_err(CopyModelError::SourceContext)?;
        // SAFETY: the source is mapped as long as `CopySource` lives. The last copy out of the
        // buffer has ended, and this copy ends before the buffer is used again.
        unsafe { reads.enqueue_copy_to_host(buffer, part.source) }?;
        reads.synchronize()?;
        bind_writer()?;
        // SAFETY: the target is inside of its allocation, and `copy_to` returns after the work has
        // ended. The buffer is written again after `emptied`; the driver waits for copies before
        // it frees the buffer.
        unsafe { writes.enqueue_copy_to_device(part.target, buffer) }?;
        emptied[slot].record(&writes)?;
    }
    Ok(writes.synchronize()?)
}

/// Parts of at most `BUFFER_BYTES`, in order.
fn split_part(part: &CopyPart) -> impl Iterator<Item = CopyPart> {
    let CopyPart { source, target, bytes } = *part;
    (0..bytes).step_by(BUFFER_BYTES).map(move |start| CopyPart {
        source: source + start,
        target: target + start,
        bytes: (bytes - start).min(BUFFER_BYTES as u64),
    })
}
