//! Wire types of Ballast: generated from `proto/proto`, used only at the edges (`grpc.rs`, hand-off frames).

#![forbid(unsafe_code)]

/// Public API that the router serves: text in, text out.
pub mod v1 {
    tonic::include_proto!("ballast.v1");
}

/// What a worker serves to the router: token ids in, token ids out.
pub mod worker {
    pub mod v1 {
        tonic::include_proto!("ballast.worker.v1");
    }
}

/// Hand-off frames, the manifest, and the weight-server's admin service.
pub mod weights {
    pub mod v1 {
        tonic::include_proto!("ballast.weights.v1");
    }
}

/// What the supervisor serves to `ballast ps` and its like.
pub mod fleet {
    pub mod v1 {
        tonic::include_proto!("ballast.fleet.v1");
    }
}

/// The encoded FileDescriptorSet of every package, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
