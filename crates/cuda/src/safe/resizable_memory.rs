// SPDX-License-Identifier: Apache-2.0

//! [`ResizableMemory`]: device memory of one process that grows and shrinks at one address, one
//! unit at a time.
//!
//! ```text
//! address        + unit_bytes   + 2 unit_bytes              + max_units * unit_bytes
//! | unit 0       | unit 1       | addresses without memory  |
//! ```
//! Addresses for `max_units` are reserved at the start, so data never moves and a captured graph
//! stays valid. Units have exportable handles, so that a pool can later be handed to another
//! process.

use super::{AddressRange, Context, Device, PhysicalMemory, describe_memory_shortage};
use crate::checked::{DeviceAccess, DriverError};

#[derive(Debug)]
pub struct ResizableMemory {
    range: AddressRange,
    unit_bytes: u64,
    /// Units that may be used. More units are mapped only after the driver failed to unmap them.
    units: u64,
    max_units: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    #[error("{}", describe_memory_shortage(*.requested_bytes, *.free_bytes))]
    OutOfMemory { requested_bytes: u64, free_bytes: Option<u64> },
    #[error("{requested} units exceed the {max} units that are reserved")]
    BeyondReservation { requested: u64, max: u64 },
    #[error("memory cannot be added to or removed from the range")]
    Driver(#[from] DriverError),
}

impl ResizableMemory {
    /// Reserves addresses for `max_units` units of `unit_bytes`, rounded up to the granularity,
    /// without memory.
    pub fn reserve(device: &Device, unit_bytes: u64, max_units: u64) -> Result<Self, ResizeError> {
        let beyond = ResizeError::BeyondReservation { requested: max_units, max: 0 };
        let sizes =
            device.allocated_bytes(unit_bytes).and_then(|unit| Some((unit, unit.checked_mul(max_units)?)));
        let Some((unit_bytes, total)) = sizes.filter(|sizes| sizes.1 > 0) else {
            return Err(beyond);
        };
        let range = AddressRange::reserve(device, total)?;
        Ok(Self { range, unit_bytes, units: 0, max_units })
    }

    /// The address of unit 0; unit n lies n * `unit_bytes` behind it. Never changes.
    pub fn address(&self) -> u64 {
        self.range.address()
    }

    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// How many units have memory now.
    pub fn units(&self) -> u64 {
        self.units
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.range.mapped_bytes()
    }

    /// Adds memory until there are `units` units; the contents of new memory are undefined. On an
    /// error the memory stays as it was.
    pub fn grow_to(&mut self, context: &Context, units: u64) -> Result<(), ResizeError> {
        if units > self.max_units {
            return Err(ResizeError::BeyondReservation { requested: units, max: self.max_units });
        }
        if units <= self.units {
            return Ok(());
        }
        context.bind()?;
        let before = self.units;
        let grown = self.add(units);
        grown.map_err(|error| {
            // Nothing uses the new units, so no fence is needed to unmap them. Should that fail
            // too, they stay mapped and unused until the memory grows again or is dropped.
            let _ = self.remove(before);
            if error.is_out_of_memory() {
                ResizeError::OutOfMemory {
                    requested_bytes: (units - before) * self.unit_bytes,
                    free_bytes: self.range.device().memory_info().map(|info| info.free_bytes),
                }
            } else {
                ResizeError::Driver(error)
            }
        })
    }

    /// Removes units until `units` are left, the last one first. `fence` must wait for all work
    /// that could touch them. It is called once, before the first unit is unmapped. If it fails,
    /// all units stay. If the driver fails to unmap a unit, that unit and those before it stay.
    pub fn shrink_to<E: From<ResizeError>>(
        &mut self,
        units: u64,
        fence: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if units < self.mapped_units() {
            fence()?;
            self.remove(units).map_err(ResizeError::Driver)?;
        }
        Ok(())
    }

    fn mapped_units(&self) -> u64 {
        self.range.mapped_bytes() / self.unit_bytes
    }

    fn add(&mut self, units: u64) -> Result<(), DriverError> {
        for unit in self.mapped_units()..units {
            let memory = PhysicalMemory::create(self.range.device(), self.unit_bytes)?;
            self.range.map(unit * self.unit_bytes, &memory)?;
        }
        let start = self.units * self.unit_bytes;
        self.range.set_access(start, units * self.unit_bytes - start, DeviceAccess::ReadWrite)?;
        self.units = units;
        Ok(())
    }

    fn remove(&mut self, units: u64) -> Result<(), DriverError> {
        for last in (units..self.mapped_units()).rev() {
            self.range.unmap(last * self.unit_bytes)?;
            self.units = self.units.min(last);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checked::{DriverApi, DriverCall, ErrorCode};
    use crate::fake::GRANULE;
    use crate::safe::tests::{CAPACITY, fake};

    #[test]
    fn range_grows_and_shrinks_behind_the_fence_at_one_address() {
        let (fake, device) = fake(4 * GRANULE);
        let context = device.context().unwrap();
        let mut memory = ResizableMemory::reserve(&device, GRANULE - 5, 8).unwrap();
        assert_eq!(memory.unit_bytes(), GRANULE);
        assert_eq!(fake.used(), 0);
        memory.grow_to(&context, 2).unwrap();
        let address = memory.address();
        // SAFETY: of the fake, which checks every access.
        unsafe { fake.copy_to_device(address + GRANULE, b"kept") }.unwrap();

        let error = memory.grow_to(&context, 5).unwrap_err();
        assert!(
            matches!(error, ResizeError::OutOfMemory { requested_bytes, free_bytes: Some(free) }
                if requested_bytes == 3 * GRANULE && free == 2 * GRANULE),
            "{error}"
        );
        assert_eq!((memory.units(), memory.address()), (2, address));
        assert!(matches!(
            memory.grow_to(&context, 9).unwrap_err(),
            ResizeError::BeyondReservation { requested: 9, max: 8 }
        ));
        memory.grow_to(&context, 4).unwrap();

        let failed: Result<(), ResizeError> =
            memory.shrink_to(1, || Err(ResizeError::BeyondReservation { requested: 0, max: 0 }));
        assert!(failed.is_err());
        assert_eq!((memory.units(), fake.used()), (4, 4 * GRANULE));
        let mut fences = 0;
        let fence = || -> Result<(), ResizeError> {
            fences += 1;
            assert_eq!(fake.used(), 4 * GRANULE);
            Ok(())
        };
        memory.shrink_to(2, fence).unwrap();
        assert_eq!((fences, memory.units(), fake.used()), (1, 2, 2 * GRANULE));
        let mut read = [0; 4];
        // SAFETY: as above.
        unsafe { fake.copy_to_host(&mut read, address + GRANULE) }.unwrap();
        assert_eq!(&read, b"kept");
        drop((memory, context));
        fake.assert_clean();
    }

    #[test]
    fn growth_that_fails_at_any_allocation_says_what_is_wanted_free_and_missing() {
        const WANTED: u64 = 4;
        for room in 0..WANTED {
            let (fake, device) = fake((1 + room) * GRANULE);
            let context = device.context().unwrap();
            let mut memory = ResizableMemory::reserve(&device, GRANULE, 1 + WANTED).unwrap();
            memory.grow_to(&context, 1).unwrap();
            let text = memory.grow_to(&context, 1 + WANTED).unwrap_err().to_string();
            // Granules of 2 MiB; what the failed attempt had got counts as free again.
            for (mib, what) in [(8, ": "), (2 * room, " are free"), (8 - 2 * room, " are missing")] {
                assert!(
                    text.contains(&format!("{mib}.0 MiB{what}")),
                    "{what:?} in {text:?}, room for {room}"
                );
            }
            assert_eq!(fake.used(), GRANULE);
            drop((memory, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn failed_growth_leaves_the_memory_as_it_was() {
        for call in [DriverCall::MemCreate, DriverCall::MemMap, DriverCall::MemSetAccess] {
            let (fake, device) = fake(CAPACITY);
            let context = device.context().unwrap();
            let mut memory = ResizableMemory::reserve(&device, GRANULE, 4).unwrap();
            memory.grow_to(&context, 1).unwrap();
            fake.fail(call, usize::from(call != DriverCall::MemSetAccess), 1, ErrorCode::OPERATING_SYSTEM);
            let error = memory.grow_to(&context, 4).unwrap_err();
            assert!(matches!(error, ResizeError::Driver(source) if source.call == call), "{error:?}");
            assert_eq!((memory.units(), memory.mapped_bytes(), fake.used()), (1, GRANULE, GRANULE));
            memory.grow_to(&context, 4).unwrap();
            drop((memory, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn units_that_the_driver_fails_to_unmap_stay_usable() {
        for failed in 0..3 {
            let (fake, device) = fake(CAPACITY);
            let context = device.context().unwrap();
            let mut memory = ResizableMemory::reserve(&device, GRANULE, 4).unwrap();
            memory.grow_to(&context, 4).unwrap();
            fake.fail(DriverCall::MemUnmap, failed, 1, ErrorCode::OPERATING_SYSTEM);
            let error = memory.shrink_to(1, || Ok::<(), ResizeError>(())).unwrap_err();
            assert!(
                matches!(error, ResizeError::Driver(source) if source.call == DriverCall::MemUnmap),
                "{error:?}"
            );
            let left = 4 - failed as u64;
            assert_eq!(
                (memory.units(), memory.mapped_bytes(), fake.used()),
                (left, left * GRANULE, left * GRANULE)
            );
            // SAFETY: of the fake, which checks every access.
            unsafe { fake.copy_to_device(memory.address() + (left - 1) * GRANULE, b"of use") }.unwrap();
            memory.shrink_to(1, || Ok::<(), ResizeError>(())).unwrap();
            assert_eq!((memory.units(), fake.used()), (1, GRANULE));
            memory.grow_to(&context, 4).unwrap();
            drop((memory, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn units_that_a_failed_growth_left_mapped_are_used_by_the_next() {
        let (fake, device) = fake(CAPACITY);
        let context = device.context().unwrap();
        let mut memory = ResizableMemory::reserve(&device, GRANULE, 4).unwrap();
        memory.grow_to(&context, 1).unwrap();
        fake.fail(DriverCall::MemSetAccess, 0, 1, ErrorCode::OPERATING_SYSTEM);
        fake.fail(DriverCall::MemUnmap, 1, 1, ErrorCode::OPERATING_SYSTEM);
        let error = memory.grow_to(&context, 4).unwrap_err();
        assert!(
            matches!(error, ResizeError::Driver(source) if source.call == DriverCall::MemSetAccess),
            "{error:?}"
        );
        assert_eq!((memory.units(), memory.mapped_bytes(), fake.used()), (1, 3 * GRANULE, 3 * GRANULE));
        let created = fake.count(DriverCall::MemCreate);
        memory.grow_to(&context, 4).unwrap();
        assert_eq!(
            (memory.units(), fake.used(), fake.count(DriverCall::MemCreate)),
            (4, 4 * GRANULE, created + 1)
        );
        // SAFETY: of the fake, which checks every access.
        unsafe { fake.copy_to_device(memory.address(), &vec![1; 4 * GRANULE as usize]) }.unwrap();
        drop((memory, context));
        fake.assert_clean();
    }

    #[test]
    fn addresses_under_a_mapping_that_stays_are_not_freed() {
        let (fake, device) = fake(CAPACITY);
        let context = device.context().unwrap();
        let mut memory = ResizableMemory::reserve(&device, GRANULE, 3).unwrap();
        memory.grow_to(&context, 3).unwrap();
        fake.fail(DriverCall::MemUnmap, 1, 1, ErrorCode::OPERATING_SYSTEM);
        drop((memory, context));
        assert_eq!(
            (fake.used(), fake.count(DriverCall::MemUnmap), fake.count(DriverCall::MemAddressFree)),
            (GRANULE, 3, 0)
        );
        assert_eq!(fake.violations(), Vec::<String>::new());
    }

    proptest! {
        #[test]
        fn resizable_memory_holds_exactly_its_units(
            capacity in 1u64..8,
            steps in prop::collection::vec((any::<bool>(), 0u64..10), 1..30),
        ) {
            let (fake, device) = fake(capacity * GRANULE);
            let context = device.context().unwrap();
            let mut memory = ResizableMemory::reserve(&device, GRANULE, 8).unwrap();
            for (grow, units) in steps {
                let before = memory.units();
                let expected = match grow {
                    true if units > 8 || units > capacity.max(before) => before,
                    true => before.max(units),
                    false => before.min(units),
                };
                let result = if grow {
                    memory.grow_to(&context, units)
                } else {
                    memory.shrink_to(units, || Ok::<(), ResizeError>(()))
                };
                prop_assert_eq!(result.is_err(), grow && (units > 8 || units > capacity.max(before)));
                prop_assert_eq!(memory.units(), expected);
                prop_assert_eq!(fake.used(), expected * GRANULE);
            }
            drop((memory, context));
            fake.assert_clean();
        }
    }
}
