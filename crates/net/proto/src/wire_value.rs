//! Values with one form on the wire. Both directions of an enum or a struct follow from one table, the order of its fields. It
//! knows no message.

use crate::FrameError;
use crate::codec::{ByteCursor, PutValue};

pub(crate) trait WireValue<'a>: Sized {
    fn put(&self, out: &mut Vec<u8>);
    /// `what` names the value in an error.
    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError>;
}

/// The form of an enum: a number for the variant, then its fields in this order. The bytes of a field after a semicolon are the
/// payload of the message.
macro_rules! wire_enum {
    ($life:lifetime $type:ty, $what:literal: $(
        $code:literal $variant:ident $(($($item:ident),+))? $({ $($field:ident),+ $(; $payload:ident)? })?,
    )+) => {
        impl<$life> $crate::wire_value::WireValue<$life> for $type {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $(($($item),+))? $({ $($field,)+ $($payload: _)? })? => {
                        $crate::codec::PutValue::put_u8(out, $code);
                        $($($item.put(out);)+)?
                        $($($field.put(out);)+)?
                    })+
                }
            }

            fn take(
                take: &mut $crate::codec::ByteCursor<$life>,
                _: &'static str,
            ) -> Result<Self, $crate::FrameError> {
                const KIND: &str = concat!("the kind of ", $what);
                Ok(match take.take_u8(KIND)? {
                    $($code => Self::$variant
                        $(($($crate::wire_value::take_field!(take, $item, $what)),+))?
                        $({ $($field: $crate::wire_value::take_field!(take, $field, $what),)+ $($payload: &[])? })?,
                    )+
                    value => return Err($crate::FrameError::Value { what: KIND, value: value.into() }),
                })
            }
        }
    };
}

/// The form of a struct: its fields in this order.
macro_rules! wire_struct {
    ($type:ident, $what:literal: $($field:ident),+) => {
        impl $crate::wire_value::WireValue<'_> for $type {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)+
            }

            fn take(
                take: &mut $crate::codec::ByteCursor<'_>,
                _: &'static str,
            ) -> Result<Self, $crate::FrameError> {
                Ok($type { $($field: $crate::wire_value::take_field!(take, $field, $what)),+ })
            }
        }
    };
}

/// Takes a field, whose name stands in the error.
macro_rules! take_field {
    ($take:ident, $field:ident, $what:literal) => {
        $crate::wire_value::WireValue::take($take, concat!("'", stringify!($field), "' of ", $what))?
    };
}

pub(crate) use {take_field, wire_enum, wire_struct};

impl WireValue<'_> for u32 {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(*self);
    }
    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        take.take_u32(what)
    }
}

impl WireValue<'_> for u64 {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u64(*self);
    }
    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        take.take_u64(what)
    }
}

impl WireValue<'_> for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u8(u8::from(*self));
    }
    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        match take.take_u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(FrameError::Value { what, value: value.into() }),
        }
    }
}

impl<'a> WireValue<'a> for &'a [u8] {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self);
    }
    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        take.take_bytes(what)
    }
}

impl WireValue<'_> for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self);
    }
    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        take.take_bytes(what).map(<[u8]>::to_vec)
    }
}

/// Whether there is a value, and the value.
impl<'a, T: WireValue<'a>> WireValue<'a> for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        self.iter().for_each(|value| value.put(out));
    }
    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        bool::take(take, what)?.then(|| T::take(take, what)).transpose()
    }
}
