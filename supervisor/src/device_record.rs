// SPDX-License-Identifier: Apache-2.0

//! The record of the quarantined devices in the runtime directory, for a successor of the
//! supervisor.

use serde::{Deserialize, Serialize};
use service::RuntimeDir;
use service::config::{self, ConfigFileError};

use crate::device_health::KnownQuarantine;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceRecord {
    #[serde(default)]
    quarantined: Vec<RecordedQuarantine>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RecordedQuarantine {
    device: String,
    reason: String,
    by_command: bool,
}

/// Empty without a record.
pub(crate) fn recorded_quarantines(directory: &RuntimeDir) -> Vec<KnownQuarantine> {
    let record = match config::load::<DeviceRecord>(&directory.devices_record()) {
        Ok(record) => record,
        Err(ConfigFileError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            DeviceRecord::default()
        }
        Err(error) => {
            let cause = service::exit::one_line(&error);
            tracing::error!(cause, "the record of the quarantined devices is lost");
            DeviceRecord::default()
        }
    };
    let known =
        |RecordedQuarantine { device, reason, by_command }| KnownQuarantine { device, reason, by_command };
    record.quarantined.into_iter().map(known).collect()
}

pub(crate) fn store_quarantines(
    directory: &RuntimeDir,
    quarantines: Vec<KnownQuarantine>,
) -> Result<(), ConfigFileError> {
    let recorded =
        |KnownQuarantine { device, reason, by_command }| RecordedQuarantine { device, reason, by_command };
    let quarantined = quarantines.into_iter().map(recorded).collect();
    config::store(&directory.devices_record(), &DeviceRecord { quarantined })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_is_read_back_and_a_missing_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::at(folder.path());
        assert_eq!(recorded_quarantines(&directory), []);
        let known = |device: &str, by_command| KnownQuarantine {
            device: device.to_owned(),
            reason: "Xid 79: \"lost\"".to_owned(),
            by_command,
        };
        let quarantines = vec![known("GPU-a", false), known("host:1", true)];
        store_quarantines(&directory, quarantines.clone()).unwrap();
        assert_eq!(recorded_quarantines(&directory), quarantines);
        std::fs::write(directory.devices_record(), "quarantined = 3").unwrap();
        assert_eq!(recorded_quarantines(&directory), []);
    }
}
