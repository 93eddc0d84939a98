//! [`GrowingRange`]: device memory of one process that grows and shrinks at one address, a unit at a time.
//!
//! Addresses for the most it may ever hold are reserved at the start, so what lies in it never moves and a captured graph
//! stays valid. Units have exportable handles: a pool can later be handed to another process.

use super::driver::{Access, Code, Refusal};
use super::physical::Physical;
use super::range::AddressRange;
use super::writable::out_of_memory;
use super::{Context, Device};

#[derive(Debug)]
pub struct GrowingRange {
    range: AddressRange,
    unit_bytes: u64,
    units: u64,
    max_units: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    #[error("{}", out_of_memory(*.asked_bytes, *.free_bytes))]
    OutOfMemory { asked_bytes: u64, free_bytes: Option<u64> },
    #[error("{asked} units are beyond the {max} that were reserved")]
    BeyondReservation { asked: u64, max: u64 },
    #[error("memory cannot be added to or taken from the range")]
    Refused(#[from] Refusal),
}

impl GrowingRange {
    /// Reserves addresses for `max_units` of at least `unit_bytes`, rounded up to whole granules; no memory yet.
    pub fn reserve(device: &Device, unit_bytes: u64, max_units: u64) -> Result<Self, GrowError> {
        let beyond = GrowError::BeyondReservation { asked: max_units, max: 0 };
        let sizes =
            device.allocated_bytes(unit_bytes).and_then(|unit| Some((unit, unit.checked_mul(max_units)?)));
        let Some((unit_bytes, total)) = sizes.filter(|sizes| sizes.1 > 0) else {
            return Err(beyond);
        };
        let range = AddressRange::reserve(device, total)?;
        Ok(Self { range, unit_bytes, units: 0, max_units })
    }

    /// Of unit 0; unit n follows n * `unit_bytes` later. Never changes.
    pub fn address(&self) -> u64 {
        self.range.address()
    }

    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// How many stand behind the address now.
    pub fn units(&self) -> u64 {
        self.units
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.range.mapped_bytes()
    }

    /// Makes `units` stand behind the address, if there are fewer. What was there stays, also on an error, and then
    /// nothing new does. The new memory holds anything.
    pub fn grow_to(&mut self, context: &Context, units: u64) -> Result<(), GrowError> {
        if units > self.max_units {
            return Err(GrowError::BeyondReservation { asked: units, max: self.max_units });
        }
        if units <= self.units {
            return Ok(());
        }
        context.bind()?;
        let before = self.units;
        let grown = self.add(units);
        grown.map_err(|refusal| {
            // The new units are in nobody's use, so no fence is needed to take them back. Should that fail too, they
            // stay mapped and unused until the range goes.
            let _ = self.remove(before);
            match refusal.code {
                Code::OUT_OF_MEMORY => GrowError::OutOfMemory {
                    asked_bytes: (units - before) * self.unit_bytes,
                    free_bytes: self.range.device().memory_info().map(|info| info.free_bytes),
                },
                _ => GrowError::Refused(refusal),
            }
        })
    }

    /// Takes units away until `units` are left. `fence` must wait for all work that could touch them: it is called once,
    /// before the first goes, and if it fails all stay.
    pub fn shrink_to<E: From<GrowError>>(
        &mut self,
        units: u64,
        fence: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if units < self.units {
            fence()?;
            self.remove(units).map_err(GrowError::Refused)?;
        }
        Ok(())
    }

    fn add(&mut self, units: u64) -> Result<(), Refusal> {
        let start = self.units * self.unit_bytes;
        while self.units < units {
            let physical = Physical::create(self.range.device(), self.unit_bytes)?;
            self.range.map(self.units * self.unit_bytes, &physical)?;
            self.units += 1;
        }
        self.range.allow(start, self.units * self.unit_bytes - start, Access::ReadWrite)
    }

    fn remove(&mut self, units: u64) -> Result<(), Refusal> {
        while self.units > units {
            self.units -= 1;
            self.range.unmap(self.units * self.unit_bytes)?;
        }
        Ok(())
    }
}
