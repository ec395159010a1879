/* many_readers DIRECTORY COUNT: COUNT threads, each of which reads the file `fN` of its number and compares it with 600 times "%08d". Exits with
 * the number of those that did not find it so (255 at most). In C because so many threads of Python are kept busy by each other. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { REPEATS = 600, WORD = 8 };
static const char *directory;

static void *read_file(void *argument)
{
	char path[4096], word[WORD + 1], data[REPEATS * WORD + 1];
	int fd, wrong;

	snprintf(path, sizeof(path), "%s/f%ld", directory, (long)argument);
	snprintf(word, sizeof(word), "%08ld", (long)argument);
	fd = open(path, O_RDONLY);
	wrong = fd < 0 || read(fd, data, sizeof(data)) != REPEATS * WORD;
	for (int i = 0; !wrong && i < REPEATS; i++)
		wrong = memcmp(data + i * WORD, word, WORD) != 0;
	close(fd);
	return (void *)(long)wrong;
}

int main(int argc, char **argv)
{
	long count = argc == 3 ? atol(argv[2]) : 0, wrong = 0;
	pthread_t *threads = calloc((size_t)count + 1, sizeof(*threads));
	pthread_attr_t attributes;

	directory = argv[1];
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 64 << 10);
	for (long i = 0; i < count; i++)
		if (pthread_create(&threads[i], &attributes, read_file, (void *)i))
			return 255;
	for (long i = 0; i < count; i++) {
		void *result;

		pthread_join(threads[i], &result);
		wrong += (long)result;
	}
	return count == 0 || wrong > 255 ? 255 : (int)wrong;
}
