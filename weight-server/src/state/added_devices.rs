// SPDX-License-Identifier: Apache-2.0

//! GPUs that the fleet begins to use while the weight-server runs. Such a GPU gets a row in the
//! ledger, and nothing else: its first loader creates the first context.

use memory::manifest::HOST_DEVICE;
use memory::numa::device_of_node;

use super::WeightServerState;
use crate::config::DeviceConfig;

impl WeightServerState {
    /// `node_bytes` is available of the NUMA node that is the GPU's own memory. The host's capacity
    /// has it if it was measured when the GPU was not known.
    pub(super) fn add_device(&mut self, device: &DeviceConfig, node_bytes: u64) {
        if !self.ledger.add_device(&device.id, device.budget) {
            return;
        }
        if let Some(node) = device.numa_node {
            self.ledger.remove_unused_device(&device_of_node(node));
            if self.host_capacity_is_measured {
                self.ledger.lower_capacity(HOST_DEVICE, node_bytes);
            }
        }
    }
}
