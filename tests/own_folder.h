// A folder for the files of this process's tests, so that nobody else's are in the way: another user's, or
// those of a second run at the same time.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

// Made when it is first asked for, removed when the process ends; not when a child of it does.
inline const std::filesystem::path& own_folder() {
    static const struct Folder {
        std::filesystem::path path;
        pid_t owner = getpid();

        Folder() {
            std::string name = (std::filesystem::temp_directory_path() / "runq_test_XXXXXX").string();
            if (mkdtemp(name.data()) == nullptr) throw std::runtime_error(name + ": cannot be made");
            path = name;
        }
        ~Folder() {
            std::error_code ignored;
            if (getpid() == owner) std::filesystem::remove_all(path, ignored);
        }
    } folder;
    return folder.path;
}
