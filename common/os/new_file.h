// A file that is there as a whole or not at all, whatever ends the process while it is written.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>

// Whether both names lead to one file, by links or not.
inline bool same_file(const std::string& a, const std::string& b) {
    struct stat x {
    }, y{};
    return stat(a.c_str(), &x) == 0 && stat(b.c_str(), &y) == 0 && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}

// Written without a name (O_TMPFILE), in the directory where it will be, and renamed into place at the end.
// Where a file system cannot do that it has a name of its own, ".runq-PID-N.part", which only a signal that
// kills leaves behind.
class NewFile {
  public:
    // Throws std::runtime_error "PATH: cannot write: reason": if the path cannot be written, or is there and
    // no regular file. A link is followed.
    explicit NewFile(const std::string& path) : path_(path), target_(path) {
        struct stat info {};
        if (stat(path.c_str(), &info) == 0) {
            if (S_ISDIR(info.st_mode)) fail(EISDIR);
            if (!S_ISREG(info.st_mode))
                throw std::runtime_error(path_ + ": cannot write: not a regular file");
            target_ = std::filesystem::canonical(path);
        } else if (errno != ENOENT) {
            fail(errno);
        }
        if (target_.filename().empty()) fail(path.empty() ? ENOENT : EISDIR);
        folder_ = target_.has_parent_path() ? target_.parent_path() : ".";
        fd_ = open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
        if (fd_ < 0) {
            temporary_ = unused_name([&](const char* name) {
                fd_ = open(name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
                return fd_ >= 0;
            });
        }
        stream_ = fdopen(fd_, "wb");
        if (stream_ == nullptr) fail(errno);
    }
    ~NewFile() {
        if (stream_ != nullptr) std::fclose(stream_);
        if (!temporary_.empty()) unlink(temporary_.c_str());
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    void write(const void* bytes, size_t n) {
        if (std::fwrite(bytes, 1, n, stream_) != n) fail(errno);
    }

    // Puts what has been written under the path, in place of what is there. Throws as the constructor.
    void commit() {
        // Without fsync a crash of the machine could leave the name with nothing behind it. EINVAL: there is
        // nothing to wait for.
        if (std::fflush(stream_) != 0 || (fsync(fd_) != 0 && errno != EINVAL)) fail(errno);
        if (temporary_.empty()) {
            const std::string self = "/proc/self/fd/" + std::to_string(fd_);
            temporary_ = unused_name([&](const char* name) {
                return linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0;
            });
        }
        if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
        temporary_.clear();
    }

  private:
    [[noreturn]] void fail(int reason) const {
        throw std::runtime_error(path_ + ": cannot write: " + std::strerror(reason));
    }

    // The first name with which make(name) succeeds. Throws if it fails because of anything but the name
    // being taken. Runs that share a directory and, in two containers, a process id must not share a name.
    template <class Make>
    std::string unused_name(Make make) const {
        for (int i = 0;; i++) {
            std::string name =
                folder_ / (".runq-" + std::to_string(getpid()) + "-" + std::to_string(i) + ".part");
            if (make(name.c_str())) return name;
            if (errno != EEXIST) fail(errno);
        }
    }

    std::string path_;  // as it was given
    std::filesystem::path target_, folder_;
    std::string temporary_;  // the file's name until it is in place; empty: it has none
    int fd_ = -1;
    std::FILE* stream_ = nullptr;
};
