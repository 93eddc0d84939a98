// SPDX-License-Identifier: Apache-2.0

//! [`PartMemory`]: where kernels find a part of a tensor: in a staging buffer, or in its slot.

use crate::cuda::{CudaError, DeviceView, DeviceViewMut, Stream};

/// Bytes of a part, readable by kernels until the work on its slot has ended.
#[derive(Clone, Copy)]
pub(super) enum PartMemory<'a> {
    Staging(DeviceView<'a, u8>),
    /// Host memory that the device reads at the host's address.
    InPlace(&'a [u8]),
}

impl<'a> PartMemory<'a> {
    /// A part of the bytes; `None` if the range leaves them.
    pub(super) fn slice(self, start: usize, len: usize) -> Option<Self> {
        match self {
            Self::Staging(view) => view.slice(start, len).map(Self::Staging),
            Self::InPlace(bytes) => bytes.get(start..start.checked_add(len)?).map(Self::InPlace),
        }
    }

    pub(super) fn len(self) -> usize {
        match self {
            Self::Staging(view) => view.len(),
            Self::InPlace(bytes) => bytes.len(),
        }
    }

    pub(super) fn view(self) -> DeviceView<'a, u8> {
        match self {
            Self::Staging(view) => view,
            // SAFETY: only rings whose memory the device reads make such parts, and the bytes are
            // neither written nor freed before the work on their slot has ended.
            Self::InPlace(bytes) => unsafe {
                DeviceView::from_raw(bytes.as_ptr().addr() as u64, bytes.len())
            },
        }
    }

    /// Enqueues a copy of the bytes to `to`, which has their length.
    pub(super) fn copy_to(self, stream: &Stream, to: &mut DeviceViewMut<'_, u8>) -> Result<(), CudaError> {
        match self {
            Self::Staging(view) => to.copy_from(stream, view),
            Self::InPlace(bytes) if bytes.len() == to.len() => {
                // SAFETY: both ranges have this length; as above, the bytes stay until the copy has
                // ended.
                unsafe { stream.enqueue_copy_to_device(to.address(), bytes) }
            }
            Self::InPlace(bytes) => {
                Err(CudaError::Length { what: "copied part", found: bytes.len(), expected: to.len() })
            }
        }
    }
}
