// SPDX-License-Identifier: Apache-2.0

//! [`LeaseRecord`]: what a successor of the weight-server must know about a lease to adopt a
//! running worker.
//!
//! The weight-server stores the record in the FD store, as a small sealed memfd beside the worker's
//! pidfd, before it grants the lease. It removes the record when the lease ends.

use bytes::Bytes;
use memory::memfd::{MemfdError, SealedMemfd};
use prost::Message;
use proto::weights::v1 as wire;

/// The format that this crate writes. It also reads the format before.
pub const LEASE_RECORD_FORMAT: u32 = 1;

/// Far above any record: device and token names are short.
const MAX_RECORD_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRecord {
    pub lease: u64,
    pub generation: u64,
    pub device: String,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    pub uid: u32,
    pub pid: i32,
    /// Clock ticks since boot at which the process started; a later process with the same number
    /// has another value.
    pub pid_start_ticks: u64,
    pub token_name: String,
    /// Digest of the token that the worker attached with; `None` if tokens were not in use.
    pub token_digest: Option<[u8; 32]>,
}

#[derive(Debug, thiserror::Error)]
pub enum LeaseRecordError {
    #[error(transparent)]
    Memfd(#[from] MemfdError),
    #[error("the lease record is not a protobuf message")]
    Malformed(#[from] prost::DecodeError),
    #[error(
        "lease record format {found} is not readable here (at most {LEASE_RECORD_FORMAT} is): restart the worker"
    )]
    Format { found: u32 },
    #[error("lease record field token_digest has {found} bytes")]
    TokenDigest { found: usize },
}

impl LeaseRecord {
    pub fn to_memfd(&self) -> Result<SealedMemfd, MemfdError> {
        let record = wire::LeaseRecord {
            format: LEASE_RECORD_FORMAT,
            lease: self.lease,
            generation: self.generation,
            device: self.device.clone(),
            kv_bytes: self.kv_bytes,
            workspace_bytes: self.workspace_bytes,
            uid: self.uid,
            pid: self.pid,
            pid_start_ticks: self.pid_start_ticks,
            token_name: self.token_name.clone(),
            token_digest: self.token_digest.map_or_else(Bytes::new, |d| Bytes::copy_from_slice(&d)),
        };
        SealedMemfd::from_bytes("ballast-lease", &record.encode_to_vec())
    }

    pub fn from_memfd(memfd: &SealedMemfd) -> Result<Self, LeaseRecordError> {
        let record = wire::LeaseRecord::decode(memfd.map("lease record", MAX_RECORD_BYTES)?)?;
        if record.format == 0 || record.format > LEASE_RECORD_FORMAT {
            return Err(LeaseRecordError::Format { found: record.format });
        }
        let token_digest = match &record.token_digest[..] {
            [] => None,
            digest => {
                Some(digest.try_into().map_err(|_| LeaseRecordError::TokenDigest { found: digest.len() })?)
            }
        };
        Ok(Self {
            lease: record.lease,
            generation: record.generation,
            device: record.device,
            kv_bytes: record.kv_bytes,
            workspace_bytes: record.workspace_bytes,
            uid: record.uid,
            pid: record.pid,
            pid_start_ticks: record.pid_start_ticks,
            token_name: record.token_name,
            token_digest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_read_back_from_its_memfd() {
        for token_digest in [None, Some([5; 32])] {
            let record = LeaseRecord {
                lease: 4,
                generation: 2,
                device: "host".to_owned(),
                kv_bytes: 1 << 30,
                workspace_bytes: 1 << 20,
                uid: 1000,
                pid: 4711,
                pid_start_ticks: 99,
                token_name: "worker-0".to_owned(),
                token_digest,
            };
            assert_eq!(LeaseRecord::from_memfd(&record.to_memfd().unwrap()).unwrap(), record);
        }
    }

    #[test]
    fn foreign_contents_are_refused() {
        let memfd = SealedMemfd::from_bytes("test", b"\x08\x07").unwrap();
        assert!(matches!(LeaseRecord::from_memfd(&memfd), Err(LeaseRecordError::Format { found: 7 })));
        let memfd = SealedMemfd::from_bytes("test", &[0xff; 40]).unwrap();
        assert!(matches!(LeaseRecord::from_memfd(&memfd), Err(LeaseRecordError::Malformed(_))));
    }
}
