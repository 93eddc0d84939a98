// SPDX-License-Identifier: Apache-2.0

//! The address that limits of a client count for.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// An IPv4 address, or the /64 network of an IPv6 address: a host has a whole /64 to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientAddress(IpAddr);

const HOST_BITS: u32 = 64;

impl From<IpAddr> for ClientAddress {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V4(address) => IpAddr::V4(address),
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> HOST_BITS << HOST_BITS))
            }
        })
    }
}

impl ClientAddress {
    /// Whether the client is on this machine. The network of `::1` is `::`.
    pub(crate) fn is_loopback(self) -> bool {
        self.0.is_loopback() || self.0.is_unspecified()
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_equal() {
        let of = |text: &str| ClientAddress::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("10.0.0.1"), of("::ffff:10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert!(
            ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"].iter().all(|text| of(text).is_loopback())
        );
        assert!(!["10.0.0.1", "2001:db8::1"].iter().any(|text| of(text).is_loopback()));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }
}
