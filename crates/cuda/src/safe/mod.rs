// SPDX-License-Identifier: Apache-2.0

//! The safe layer: owners of what the checked layer returns.

mod address_range;
mod buffer;
mod device;
mod error;
mod graph;
mod host_pages;
mod memory_text;
mod module;
mod physical_memory;
mod pinned;
mod resizable_memory;
mod selector;
mod stream;
mod view;

#[cfg(test)]
mod tests;

pub use address_range::AddressRange;
pub use buffer::Buffer;
pub use device::{Context, Device, DeviceError, devices};
pub use error::CudaError;
pub use graph::Graph;
pub use host_pages::HostPages;
pub use memory_text::{describe_memory_shortage, format_mib};
pub use module::{Kernel, LazyModule};
pub use physical_memory::PhysicalMemory;
pub use pinned::{PinError, PinnedBuffer};
pub use resizable_memory::{ResizableMemory, ResizeError};
pub use selector::{DeviceSelector, DeviceSelectorError};
pub use stream::{Event, Stream};
pub use view::{DeviceView, DeviceViewMut};
