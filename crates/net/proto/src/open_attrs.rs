//! The wire format of calls about the rights and the extended attributes of an open file. It knows no request around them.

use crate::FrameError;
use crate::codec::{ByteCursor, PutValue};
use spurline_volume::writes::OpenAttrCall;

/// Encodes a call; a value that is set is the payload of its request.
pub(crate) fn put_attr_call(call: &OpenAttrCall<'_>, out: &mut Vec<u8>) {
    match call {
        OpenAttrCall::Access(mask) => {
            out.put_u8(1);
            out.put_u32(*mask);
        }
        OpenAttrCall::Get(name) => {
            out.put_u8(2);
            out.put_bytes(name);
        }
        OpenAttrCall::List => out.put_u8(3),
        OpenAttrCall::Set { name, value: _, flags } => {
            out.put_u8(4);
            out.put_bytes(name);
            out.put_u32(*flags);
        }
        OpenAttrCall::Remove(name) => {
            out.put_u8(5);
            out.put_bytes(name);
        }
    }
}

/// Decodes a call, without the value that is set.
pub(crate) fn take_attr_call<'a>(take: &mut ByteCursor<'a>) -> Result<OpenAttrCall<'a>, FrameError> {
    const NAME: &str = "an attribute's name";
    Ok(match take.take_u8("the kind of a call about attributes")? {
        1 => OpenAttrCall::Access(take.take_u32("rights")?),
        2 => OpenAttrCall::Get(take.take_bytes(NAME)?),
        3 => OpenAttrCall::List,
        4 => OpenAttrCall::Set { name: take.take_bytes(NAME)?, value: &[], flags: take.take_u32("flags")? },
        5 => OpenAttrCall::Remove(take.take_bytes(NAME)?),
        value => {
            return Err(FrameError::Value { what: "the kind of a call about attributes", value: value.into() });
        }
    })
}
