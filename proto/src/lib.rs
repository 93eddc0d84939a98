// SPDX-License-Identifier: Apache-2.0

//! Protobuf types of Ballast, generated from `proto/proto`. Only the code at the edge of each
//! process uses them (`grpc.rs`, `wire.rs`, hand-off frames).

#![forbid(unsafe_code)]

/// The public API of the router: text in, text out.
pub mod v1 {
    tonic::include_proto!("ballast.v1");
}

/// The API of a worker for the router: token ids in, token ids out.
pub mod worker {
    #[expect(clippy::large_enum_variant, reason = "the description is the first frame of many")]
    pub mod v1 {
        tonic::include_proto!("ballast.worker.v1");
    }
}

/// Hand-off frames, the manifest, and the admin service of the weight-server.
pub mod weights {
    pub mod v1 {
        tonic::include_proto!("ballast.weights.v1");
    }
}

/// The API of the supervisor for `ballast ps` and other commands.
pub mod fleet {
    pub mod v1 {
        tonic::include_proto!("ballast.fleet.v1");
    }
}

/// The encoded `FileDescriptorSet` of every package, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
