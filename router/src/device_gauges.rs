// SPDX-License-Identifier: Apache-2.0

//! Metrics of the fleet's devices and of models without one, as the supervisor reports them. What a
//! board or a driver does not report has no line.

use std::fmt::Write as _;

use proto::fleet::v1::{Device, DeviceFigures};

use crate::gauges::escape;

type Figure = fn(&DeviceFigures) -> Option<f64>;

/// Name, type, further label and value.
const FIGURES: [(&str, &str, &str, Figure); 7] = [
    ("device_temperature_celsius", "gauge", "", |f| f.temperature_celsius.map(f64::from)),
    ("device_power_watts", "gauge", "", |f| f.power_milliwatts.map(|power| f64::from(power) / 1e3)),
    ("device_utilization_ratio", "gauge", "", |f| f.utilization_percent.map(|part| f64::from(part) / 1e2)),
    ("device_memory_used_bytes", "gauge", "", |f| f.memory_used_bytes.map(|bytes| bytes as f64)),
    ("device_memory_total_bytes", "gauge", "", |f| f.memory_total_bytes.map(|bytes| bytes as f64)),
    ("device_ecc_errors_total", "counter", ",kind=\"corrected\"", |f| {
        f.corrected_ecc_errors.map(|errors| errors as f64)
    }),
    ("device_ecc_errors_total", "counter", ",kind=\"uncorrected\"", |f| {
        f.uncorrected_ecc_errors.map(|errors| errors as f64)
    }),
];

/// The metrics in the Prometheus text format.
pub(crate) fn render(devices: &[Device], on_fallback: &[String]) -> String {
    let mut page = String::new();
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        writeln!(page, "{arguments}").expect("writing to a string cannot fail");
    };
    let mut last = "";
    for (name, kind, label, value) in FIGURES {
        if std::mem::replace(&mut last, name) != name {
            line(format_args!("# TYPE ballast:{name} {kind}"));
        }
        for device in devices {
            let Some(value) = device.figures.as_ref().and_then(value) else { continue };
            let device = escape(&device.device);
            line(format_args!("ballast:{name}{{device=\"{device}\"{label}}} {value}"));
        }
    }
    line(format_args!("# TYPE ballast:device_xid_errors_total counter"));
    for device in devices {
        let name = escape(&device.device);
        for xid in &device.xids {
            let (xid, count) = (xid.xid, xid.count);
            line(format_args!("ballast:device_xid_errors_total{{device=\"{name}\",xid=\"{xid}\"}} {count}"));
        }
    }
    line(format_args!("# TYPE ballast:device_quarantined gauge"));
    for device in devices {
        let (name, value) = (escape(&device.device), u32::from(device.quarantine.is_some()));
        line(format_args!("ballast:device_quarantined{{device=\"{name}\"}} {value}"));
    }
    line(format_args!("# TYPE ballast:model_on_fallback gauge"));
    for model in on_fallback {
        line(format_args!("ballast:model_on_fallback{{model_name=\"{}\"}} 1", escape(model)));
    }
    page
}

#[cfg(test)]
mod tests {
    use proto::fleet::v1::{Quarantine, XidCount};

    use super::*;

    #[test]
    fn a_figure_that_is_not_reported_has_no_line() {
        let figures = DeviceFigures { power_milliwatts: Some(312_500), ..DeviceFigures::default() };
        let gpu = Device {
            device: "GPU-a".to_owned(),
            figures: Some(figures),
            xids: vec![XidCount { xid: 79, count: 2 }],
            quarantine: Some(Quarantine::default()),
        };
        let host = Device { device: "host".to_owned(), ..Device::default() };
        let text = render(&[host, gpu], &["m".to_owned()]);
        let values: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "ballast:device_power_watts{device=\"GPU-a\"} 312.5",
            "ballast:device_xid_errors_total{device=\"GPU-a\",xid=\"79\"} 2",
            "ballast:device_quarantined{device=\"host\"} 0",
            "ballast:device_quarantined{device=\"GPU-a\"} 1",
            "ballast:model_on_fallback{model_name=\"m\"} 1",
        ];
        assert_eq!(values, expected);
        assert_eq!(text.matches("# TYPE ballast:device_ecc_errors_total").count(), 1);
    }
}
