// SPDX-License-Identifier: Apache-2.0

//! Copies a model onto a GPU from the copy on another GPU. The checksums are computed on the
//! target, from the bytes that its kernels will read.

use std::time::Instant;

use cuda::{Device, DeviceSelector, DeviceUuid};
use kernels::cuda::loading::{self, TensorDestination};
use memory::device::{self, CopyRoute, TensorPlace, WritableModel};
use memory::manifest::Allocation;

use super::gpu::{ALLOCATION_RETRY_TIMEOUT, GpuTarget};
use super::gpu_error::GpuLoadError;
use crate::loader::copy::SourceGeneration;
use crate::loader::target::{CopiedAllocations, LoadPlan};

impl GpuTarget {
    pub(super) fn copy_from(
        &self,
        plan: &LoadPlan,
        source: &SourceGeneration,
    ) -> Result<CopiedAllocations, GpuLoadError> {
        let started = Instant::now();
        let (context, name) = (&self.context, source.device());
        let target = context.device();
        context.bind()?;
        let uuid = DeviceUuid::parse(&name).ok_or_else(|| GpuLoadError::SourceName { name: name.clone() })?;
        let selector = DeviceSelector::Uuid(uuid);
        let from = Device::open(self.driver.clone(), selector).map_err(GpuLoadError::SourceDevice)?;
        let route = CopyRoute::between(&from, target)?;
        let mapped = device::CopySource::import(&from, target, route, &source.manifest, &source.fds)?;
        let imported = started.elapsed();
        let sizes = &plan.pack.allocations;
        let mut model = WritableModel::allocate(context, sizes, ALLOCATION_RETRY_TIMEOUT)?;
        let allocated = started.elapsed();
        let placements = &plan.pack.placements;
        let places: Vec<TensorPlace> = placements
            .iter()
            .map(|place| TensorPlace { allocation: place.allocation, offset: place.offset })
            .collect();
        mapped.copy_to(context, &mut model, &places)?;
        let copied = started.elapsed();
        let destinations = placements.iter().zip(&self.tiles).map(|(place, tiles)| TensorDestination {
            allocation: place.allocation,
            offset: place.offset,
            tiles: *tiles,
        });
        let laid_out = loading::sum_model(target, &model, &destinations.collect::<Vec<_>>())?;
        let checked = started.elapsed();
        // The process exits soon, which unmaps the source faster than the driver's calls do.
        std::mem::forget(mapped);
        let fds = model.finish()?;
        let (copy_time, bytes) = (copied - allocated, source.manifest.tensor_bytes());
        tracing::info!(
            source = name,
            ?route,
            bytes,
            import_ms = imported.as_millis() as u64,
            allocate_ms = (allocated - imported).as_millis() as u64,
            copy_ms = copy_time.as_millis() as u64,
            check_ms = (checked - copied).as_millis() as u64,
            finish_ms = (started.elapsed() - checked).as_millis() as u64,
            gigabytes_per_second = bytes as f64 / copy_time.as_secs_f64() / 1e9,
            "copied the weights from another device"
        );
        let entries = sizes.iter().map(|&bytes| Allocation { device: 0, bytes, inode: 0 }).collect();
        Ok(CopiedAllocations { fds, entries, laid_out, copy_time })
    }
}
