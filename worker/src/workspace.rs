// SPDX-License-Identifier: Apache-2.0

//! The workspace of a worker: the memory of its device that holds neither weights, nor context, nor
//! KV cache.

/// Bytes of the worker's device that are reserved with the lease, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceBytes {
    /// Activations and logits of the largest step; on the host also deferred logits.
    pub activations: u64,
    /// Buffers that kernels keep between steps.
    pub scratch: u64,
    pub graphs: u64,
    /// CUDA modules, and what the driver keeps beside a context.
    pub modules: u64,
    /// On the host: the process itself.
    pub process: u64,
}

impl WorkspaceBytes {
    pub fn total(&self) -> u64 {
        self.activations + self.scratch + self.graphs + self.modules + self.process
    }

    /// The workspace of two models that compute in turn in one process. Kernel buffers serve both
    /// models.
    pub(crate) fn shared_with(self, other: Self) -> Self {
        Self {
            activations: self.activations + other.activations,
            scratch: self.scratch.max(other.scratch),
            graphs: self.graphs.max(other.graphs),
            modules: self.modules.max(other.modules),
            process: self.process.max(other.process),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_models_of_a_process_share_kernel_buffers() {
        let large = WorkspaceBytes { activations: 20, scratch: 10, graphs: 2, modules: 14, process: 9 };
        let small = WorkspaceBytes { activations: 5, scratch: 11, graphs: 1, modules: 14, process: 0 };
        let both = WorkspaceBytes { activations: 25, scratch: 11, graphs: 2, modules: 14, process: 9 };
        assert_eq!((large.shared_with(small), small.shared_with(large)), (both, both));
    }
}
