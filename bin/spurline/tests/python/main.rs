//! The Python package, without a mount: the package's tests run by pytest, beside a node, an S3 server and a directory of this program.
//! The package is put together from the Python files and the library that the build of these tests has made.

mod package;
