//! What this program adds to a bucket beside the objects of programs: hidden objects, and the mark of the change that made an object.
//! Knows no request.

use crate::write_backend::ObjectAttributes;

/// The start of the names of objects in the root of a source that listings hide.
pub const HIDDEN_NAME: &str = ".spurline-";

/// The attribute with the mark of the change that made an object.
const MARK: &str = "spurline-op";

/// The attributes with this mark.
pub fn marked_as(mut attributes: ObjectAttributes, mark: &str) -> ObjectAttributes {
    attributes.set(MARK, mark.to_owned());
    attributes
}

/// The attributes without the mark of a change.
pub fn without_mark(mut attributes: ObjectAttributes) -> ObjectAttributes {
    attributes.user.retain(|(name, _)| name != MARK);
    attributes
}

/// The mark of the change that made an object.
pub fn mark_in(attributes: &ObjectAttributes) -> Option<&str> {
    attributes.get(MARK)
}
